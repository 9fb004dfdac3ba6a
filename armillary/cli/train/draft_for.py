"""`armillary train --draft-for MODEL`: trains a draft head for a model and writes it beside the model's weights, where
`serve.speculate=mtp` finds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.data import on_bar, say_prepared
from armillary.cli.open_model import open_model
from armillary.cli.output import Output, path_text
from armillary.errors import BadInput
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.units import count_text

if TYPE_CHECKING:
    from armillary.training.draft_head import HeadStep, HeadTrainer
    from armillary.training.open_data import OpenData

_PRECISIONS = ("fp32", "tf32", "bf16")


def train_draft_head(out: Output, home: Home, recipe: Recipe, name: str, *, device: str | None) -> dict[str, Any]:
    """On one device, with the recipe's data, steps, rates, micro-batch and precision."""
    from armillary.model.device import fit_threads, pick_device
    from armillary.model.weights.hf_layout import mtp_rules
    from armillary.model.weights.mtp_weights import save_draft_head
    from armillary.training.draft_head import HeadTrainer
    from armillary.training.step.numerics import numerics

    fit_threads()
    precision = _precision(recipe, pick_device(device).type)
    half = precision == "bf16"
    source, model = open_model(
        out, home, name, random_weights=False, dtype="bf16" if half else "fp32", device=device, packed=False
    )
    if source.folder is None or source.release is not None:
        raise BadInput(f"{name} is no folder or run to write a draft head into; give the run or the folder it is from")
    mtp_rules(model.config, 0)  # refuses a family whose tensors have no names here, before anything is trained
    if model.config.num_recurrent_layers:
        raise BadInput(
            f"{name} has recurrent states, which cannot go back over rejected draft tokens; take another model"
        )
    data = _open_data(out, home, recipe, source.folder, model.config.vocab)
    options: dict[str, Any] = {"micro_batch": recipe.layout.micro_batch, "precision": precision}
    with numerics(tf32=precision == "tf32", deterministic=recipe.train.deterministic):
        trainer = HeadTrainer(model, data, recipe.train, **options)
        out.say(f"a draft head of {count_text(trainer.num_parameters)} parameters for {source.name}")
        last = _steps(out, trainer)
        measured = trainer.validate() or last
    folder = save_draft_head(
        trainer.head, model.config, source.folder, {"steps": recipe.train.steps, **_outcome(measured)}
    )
    out.say(f"draft tokens that are the model's: {', '.join(f'{each:.0%}' for each in measured.agreed)} by place")
    out.say(f"wrote {path_text(folder)}")
    out.say(f"next: armillary serve {name} --set serve.speculate=mtp")
    return {"folder": str(folder), "steps": recipe.train.steps, **_outcome(measured)}


def _precision(recipe: Recipe, device: str) -> str:
    asked = recipe.layout.precision
    if asked == "auto":
        return "bf16" if device == "cuda" else "fp32"
    if asked not in _PRECISIONS:
        known = ", ".join(_PRECISIONS)
        raise BadInput(f"a draft head is trained in {known}, not in {asked}; try --set layout.precision=bf16")
    return asked


def _open_data(out: Output, home: Home, recipe: Recipe, folder: Path, vocab: int) -> OpenData:
    from armillary.training.open_data import open_data, plan_data, prepare_data

    tokenizer = Path(recipe.data.tokenizer) if recipe.data.tokenizer else folder
    if not (tokenizer / "tokenizer.json").is_file() and not recipe.data.tokenizer:
        raise BadInput(f"{folder} has no tokenizer; name the model's with --set data.tokenizer=FOLDER")
    planned = plan_data(recipe.data, home, vocab=recipe.data.vocab or vocab, tokenizer=tokenizer)
    with out.progress("preparing", unit="B") as bar:
        for prepared in prepare_data(recipe.data, planned, on_bar(bar)):
            say_prepared(out, prepared)
    opened = open_data(planned, recipe.train)
    if opened.vocab > vocab:
        raise BadInput(
            f"the data has {opened.vocab:,} token ids and the model {vocab:,}; prepare it with its tokenizer"
        )
    return opened


def _steps(out: Output, trainer: HeadTrainer) -> HeadStep:
    with out.progress("train", total=trainer.job.steps, unit="step") as bar:
        for step in trainer.steps():
            bar.at(step.step + 1, None, loss=f"{step.loss:.3f}", agreed=f"{step.agreed[0]:.0%}")
    return step


def _outcome(step: HeadStep) -> dict[str, Any]:
    return {"loss": step.loss, "accepted": list(step.accepted), "agreed": list(step.agreed)}
