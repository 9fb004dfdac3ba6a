"""From a recipe to a run: find the model, check that everything divides, prepare the data, make the run folder.

Nothing is written before every check has passed. The plan's predictions are handed in by whoever can make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import BadRecipe
from armillary.profiling.machine import here
from armillary.spec.layout_rules import check_layout
from armillary.spec.model import ModelConfig
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, check_recipe, load_recipe, to_dict
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.store.source import ModelSource, resolve_model
from armillary.training.data.prepare import Prepared, prepare
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
        if data.path:
            return Path(data.path)
        stem = Path(data.source).name or data.source
        return self.home.data / f"{stem}-{self._tokenizer.name if self._tokenizer else self._vocab}"

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
        """The recipe's text as shards, made now or earlier."""
        data = self.recipe.data
        return prepare(
            data.source,
            self.data_folder,
            vocab=self._vocab,
            tokenizer=self._tokenizer,
            key=data.key,
            held_out=data.held_out,
            seed=data.seed,
            progress=progress,
        )

    def create_run(self, *, text: str = "", overrides: Sequence[str] = ()) -> Run:
        """The run's folder with recipe and plan; `text` is the recipe file as it was given."""
        return create_run(
            self.home,
            to_dict(self.recipe),
            text=text,
            overrides=overrides,
            plan=self.plan.to_dict(),
            model=self.plan.model.name,
            steps=self.plan.train.steps,
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
    plan = Plan.of(recipe, config, cluster, predicted=predicted)
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
    return train(begun.plan, begun.create_run(overrides=overrides), data, weights=begun.weights, device=device, watch=watch)
