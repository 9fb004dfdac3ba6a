"""From a recipe to a run: find the model, check that everything divides, prepare the data, make the run folder.

Nothing is written before every check has passed. The plan's predictions are handed in by whoever can make them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.errors import BadRecipe
from armillary.profiling.machine import here
from armillary.spec.fields import to_plain
from armillary.spec.layout_rules import check_layout
from armillary.spec.model import ModelConfig
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, check_recipe, load_recipe, to_dict
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.store.source import ModelSource, resolve_model
from armillary.training.data.prepare import Prepared, folder_name, prepare
from armillary.training.data.survey import Progress
from armillary.training.loop import Trained, Watch, train
from armillary.training.supported import refuse_unsupported


@dataclass(frozen=True, kw_only=True)
class Start:
    """Everything a run needs, checked."""

    recipe: Recipe
    plan: Plan
    source: ModelSource
    home: Home

    @property
    def weights(self) -> Path | None:
        """The folder to start from, or None to start from scratch."""
        return self.source.folder

    @property
    def data_folder(self) -> Path:
        data = self.recipe.data
        return Path(data.path) if data.path else self.home.data / folder_name(data.source, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        data = self.recipe.data
        chosen: dict[str, Any] = {"vocab": self._vocab, "tokenizer": self._tokenizer}
        return chosen | {"key": data.key, "held_out": data.held_out, "seed": data.seed}

    @property
    def _tokenizer(self) -> Path | None:
        """The tokenizer asked for, or the model's own."""
        if self.recipe.data.tokenizer:
            return Path(self.recipe.data.tokenizer)
        files = self.source.files
        return files if files is not None and (files / "tokenizer.json").is_file() else None

    @property
    def _vocab(self) -> int:
        return self.recipe.data.vocab or self.plan.model.vocab

    def prepare(self, progress: Progress = lambda done, total, what: None) -> Prepared:
        """The recipe's text as shards, made now or earlier. A folder that the store named is made anew when the text
        has changed; one that a person named is left alone."""
        data = self.recipe.data
        return prepare(data.source, self.data_folder, **self._settings, overwrite=not data.path, progress=progress)

    def create_run(self, *, text: str = "", overrides: Sequence[str] = ()) -> Run:
        """The run's folder with recipe and plan; `text` is the recipe file as it was given."""
        return create_run(
            self.home,
            to_dict(self.recipe),
            text=text,
            overrides=overrides,
            plan=to_plain(self.plan),
            model=self.plan.model.name,
            steps=self.recipe.train.steps,
        )


Predict = Callable[[Recipe, ModelConfig], Mapping[str, float]]


def start(recipe: Recipe, home: Home, source: ModelSource, *, predict: Predict | None = None) -> Start:
    """Check the recipe against its model, its devices and what the trainer can do."""
    config = recipe.model_config(source.config)
    if source.folder is not None and config != source.config:
        raise BadRecipe(f"{source.name} has weights, so its shape cannot be overridden; leave [model] at path or name")
    check_recipe(recipe, config)
    cluster = recipe.cluster(here())
    check_layout(
        recipe.layout, config, sequence=recipe.train.sequence, batch_tokens=recipe.train.batch_tokens, for_training=True
    )
    predicted = dict(predict(recipe, config)) if predict else {}
    plan = Plan(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        recipe=to_dict(recipe),
        model=config,
        cluster=cluster,
        layout=recipe.layout,
        train=recipe.train,
        data=recipe.data,
        predicted=predicted,
    )
    refuse_unsupported(plan)
    return Start(recipe=recipe, plan=plan, source=source, home=home)


def train_recipe(
    recipe: Recipe | Path | str,
    overrides: Sequence[str] = (),
    *,
    home: Home | None = None,
    device: str | None = None,
    watch: Watch | None = None,
) -> Trained:
    """Train what a recipe (or its file) says, from beginning to end."""
    home = home or Home.default()
    ready = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    source = resolve_model(ready.model.source, home, need_weights=False)
    begun = start(ready, home, source)
    data = begun.prepare().folder
    return train(
        begun.plan, begun.create_run(overrides=overrides), data, weights=begun.weights, device=device, watch=watch
    )
