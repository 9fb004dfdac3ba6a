"""From a recipe to a run: find the model, check that everything divides and can be exported, prepare the data.

Nothing is written before every check has passed. The plan that comes out says all that a rank needs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from armillary.errors import BadRecipe
from armillary.model.buildable import refuse_unbuildable
from armillary.model.device import pick_device
from armillary.model.fusing import rules
from armillary.profiling.machine import here
from armillary.spec.fields import to_plain
from armillary.spec.hf_config import to_hf
from armillary.spec.layout_rules import check_layout
from armillary.spec.model import ModelConfig
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, check_recipe, load_recipe, to_dict
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.store.source import ModelSource, resolve_model
from armillary.training.data.corpus import find_corpus
from armillary.training.data.prepare import Prepared, folder_name, prepare
from armillary.training.data.survey import Progress
from armillary.training.loop import Trained, Watch, train
from armillary.training.supported import refuse_unsupported, unsupported_notes


@dataclass(frozen=True, kw_only=True)
class Start:
    """A checked recipe, its plan, and where its data goes."""

    recipe: Recipe
    """as it was given, overrides applied"""
    plan: Plan
    """what every rank reads"""
    home: Home
    """where runs and data are kept"""
    settings: dict[str, Any]
    """how the data is prepared"""

    def prepare(self, progress: Progress = lambda done, total, what: None) -> Prepared:
        """The recipe's text as shards, made now or earlier. A folder that the store named is made anew when the text
        has changed; one that a person named is left alone."""
        assert self.plan.data is not None
        named = bool(self.recipe.data.path)
        return prepare(
            self.plan.data.source, self.plan.data.path, **self.settings, overwrite=not named, progress=progress
        )

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


def start(recipe: Recipe, home: Home, source: ModelSource) -> Start:
    """Check the recipe against its model, its devices and what the trainer can do; training starts from the weights
    of `source`, or from scratch where it has none."""
    config = recipe.model_config(source.config)
    if source.folder is not None and config != source.config:
        raise BadRecipe(f"{source.name} has weights, so its shape cannot be overridden; add --random-weights")
    _check_model(recipe, config)
    refuse_unsupported(recipe)
    cluster = recipe.cluster(here())
    job = recipe.train
    check_layout(
        recipe.layout, config, num_devices=cluster.num_devices, sequence=job.sequence, batch_tokens=job.batch_tokens
    )
    settings = _data_settings(recipe, config, source)
    path = recipe.data.path or str(home.data / folder_name(recipe.data.source, **settings))
    if not Path(path).exists():
        find_corpus(recipe.data.source, key=recipe.data.key)  # said now if there is no such text
    plan = Plan(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        recipe=to_dict(recipe),
        model=config,
        cluster=cluster,
        layout=recipe.layout,
        train=recipe.train,
        data=replace(recipe.data, path=path),
        weights=str(source.folder or ""),
        notes=tuple(unsupported_notes(config)),
    )
    return Start(recipe=recipe, plan=plan, home=home, settings=settings)


def _check_model(recipe: Recipe, config: ModelConfig) -> None:
    """What is trained must be buildable and, in the end, exportable: better said now than after the last step."""
    refuse_unbuildable(config)
    rules(config)
    to_hf(config)
    check_recipe(recipe, config)
    # tp first: a layout that could never divide the model is a plainer message than "one device only"
    check_layout(recipe.layout, config)


def _data_settings(recipe: Recipe, config: ModelConfig, source: ModelSource) -> dict[str, Any]:
    """The tokenizer asked for, or the model's own, or one trained on the text with as many ids as the model has."""
    data = recipe.data
    own = source.files if source.files is not None and (source.files / "tokenizer.json").is_file() else None
    tokenizer = Path(data.tokenizer) if data.tokenizer else own
    chosen: dict[str, Any] = {"vocab": data.vocab or config.vocab, "tokenizer": tokenizer}
    return chosen | {"key": data.key, "held_out": data.held_out, "seed": data.seed}


def starting_point(recipe: Recipe, home: Home, *, random_weights: bool = False) -> ModelSource:
    """The recipe's model: a name of the catalogue or a bare config.json is trained from scratch; a folder, a run, a
    release or a Hub id goes on from its weights, unless `random_weights` asks for its shape only."""
    source = resolve_model(recipe.model.source, home, need_weights=False)
    if random_weights:
        return replace(source, folder=None)
    shape_only = source.origin in ("catalogue", "config")
    return source if shape_only else resolve_model(recipe.model.source, home, need_weights=True)


def train_recipe(
    recipe: Recipe | Path | str,
    overrides: Sequence[str] = (),
    *,
    home: Home | None = None,
    random_weights: bool = False,
    device: str | None = None,
    watch: Watch | None = None,
) -> Trained:
    """Train what a recipe (or its file) says, from beginning to end."""
    home = home or Home.default()
    ready = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    begun = start(ready, home, starting_point(ready, home, random_weights=random_weights))
    pick_device(device)
    begun.prepare()
    return train(begun.plan, begun.create_run(overrides=overrides), device=device, watch=watch)
