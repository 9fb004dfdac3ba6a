"""What `plan` verbs are asked: a recipe, or a model and a cluster, with the flags they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from armillary.cli import completion
from armillary.cli.output import Output
from armillary.cli.verb_decorator import set_option
from armillary.errors import BadInput, NotFound
from armillary.store.home import Home
from armillary.units import parse_count

if TYPE_CHECKING:
    from armillary.planning.training.resolve_recipe import TrainingProblem
    from armillary.spec.hardware import Cluster
    from armillary.spec.model import ModelConfig
    from armillary.spec.network_domains import Domain
    from armillary.spec.recipe import Recipe


Function = TypeVar("Function", bound=Callable[..., Any])


def recipe_options(function: Function) -> Function:
    """RECIPE, --model, --on, --sequence, --batch-tokens, --lora and --set."""
    for option in reversed(
        (
            click.argument("recipe", type=click.Path(path_type=Path), required=False),
            click.option(
                "--model", metavar="M", help="Instead of a recipe: a model.", shell_complete=completion.models
            ),
            click.option("--on", metavar="HARDWARE", help="Devices, like h100x64 or dgx-h200x8; over the recipe's."),
            click.option("--sequence", metavar="N", help="Tokens per sequence; over the recipe's."),
            click.option("--batch-tokens", metavar="N", help="Tokens per step, like 4M; over the recipe's."),
            click.option("--lora", metavar="R", help="Fine-tune with adapters of rank R; 16:nf4 beside 4-bit weights."),
            set_option,
        )
    ):
        function = option(function)
    return function


def read_recipe(
    recipe: Path | Mapping[str, Any] | None,
    model: str | None,
    on: str | None,
    sequence: str | None,
    batch_tokens: str | None,
    overrides: tuple[str, ...],
) -> Recipe:
    """The recipe (a file, or the tables of a run) with the flags over it, or a recipe made of the flags."""
    from armillary.spec.recipe import load_recipe, recipe_from_dict

    if (recipe is None) == (model is None):
        raise BadInput("give a recipe or --model with --on, like armillary plan --model llama-3-8b --on h100x8")
    flags = [f"hardware.on={on}"] if on else []
    flags += [f"train.sequence={parse_count(sequence)}"] if sequence else []
    flags += [f"train.batch_tokens={parse_count(batch_tokens)}"] if batch_tokens else []
    if recipe is not None:
        changes = (*overrides, *flags)
        return load_recipe(recipe, changes) if isinstance(recipe, Path) else recipe_from_dict(recipe, changes)
    if not on and not any(text.startswith("hardware.") for text in overrides):
        raise BadInput(f"--model {model} needs --on, like --on h100x8, or --on here")
    tokens = parse_count(sequence) if sequence else 1  # no contradiction before the model is known
    batch = parse_count(batch_tokens) if batch_tokens else max(tokens, 65_536)
    return recipe_from_dict(
        {
            "model": {"path" if Path(model or "").exists() else "name": model},
            "train": {"sequence": tokens, "batch_tokens": batch},
        },
        (*overrides, *flags),
    )


def ask(
    out: Output,
    home: Home,
    *,
    recipe: Path | Mapping[str, Any] | None,
    model: str | None,
    on: str | None,
    sequence: str | None,
    batch_tokens: str | None,
    lora: str | None,
    overrides: tuple[str, ...],
    domains: Sequence[Domain] = (),
) -> TrainingProblem:
    """The training problem with model and devices found; what the flags leave out is derived and noted. `domains` are
    those of the nodes in their network."""
    from armillary.planning.training.resolve_recipe import resolve
    from armillary.spec.network_domains import with_domains
    from armillary.spec.recipe import check_recipe

    asked = read_recipe(recipe, model, on, sequence, batch_tokens, overrides)
    config = model_config(out, home, asked)
    cluster = with_domains(find_cluster(asked), domains)
    notes: list[str] = []
    if recipe is None:
        asked, notes = _with_usual(asked, config, cluster, sequence, batch_tokens)
    check_recipe(asked, config)
    problem = resolve(asked, config, cluster, home, lora)
    return replace(problem, notes=(*notes, *problem.notes))


def model_config(out: Output, home: Home, recipe: Recipe) -> ModelConfig:
    """The recipe's model; a name of the catalogue is answered without looking anywhere else."""
    recipe.model.load_code()
    if not Path(recipe.model.source).exists():
        with suppress(NotFound):
            return recipe.model_config()
    from armillary.cli.open_model import find_model

    return recipe.model_config(find_model(out, home, recipe.model.source, need_weights=False).config)


def find_cluster(recipe: Recipe) -> Cluster:
    """The recipe's devices; this machine is inspected only where the recipe names it."""
    if not recipe.hardware.is_here:
        return recipe.cluster()
    from armillary.machine.machine import here

    return recipe.cluster(here())


def _with_usual(
    recipe: Recipe, config: ModelConfig, cluster: Cluster, sequence: str | None, batch_tokens: str | None
) -> tuple[Recipe, list[str]]:
    """Defaults for sequence and batch, and a batch that divides evenly."""
    from armillary.planning.training.resolve_recipe import dividing_batch, usual_sequence
    from armillary.spec.tables.train import TrainJob

    said_s = sequence is not None or recipe.train.sequence > 1
    length = recipe.train.sequence if said_s else usual_sequence(config)
    wanted = recipe.train.batch_tokens if batch_tokens or recipe.train.batch_tokens != 65_536 else None
    batch, note = dividing_batch(wanted, length, cluster.num_devices)
    train = replace(recipe.train, sequence=length, batch_tokens=batch)
    notes = [] if said_s else [f"sequences of {length:,} tokens were assumed; --sequence says otherwise"]
    if train.steps == TrainJob().steps:
        notes.append(f"{train.steps:,} steps were assumed; --set train.steps=100000 says otherwise")
    return replace(recipe, train=train), [*notes, *([note] if note else [])]


def take_run(out: Output, home: Home, name: str, asked: dict[str, Any]) -> str:
    """Ask about the recipe of a run with the lever of its diagnosis, and say which lever that is; gives what the run
    did, train or serve."""
    if asked["recipe"] or asked["model"]:
        raise BadInput(f"--from {name} brings its own recipe; leave the other out, and change it with --set")
    from armillary.cli.diagnose import first_worthwhile
    from armillary.diagnosis.evidence.finding import overrides_of
    from armillary.diagnosis.outcome.diagnosis import read_diagnosis
    from armillary.store.runs import find_run

    run = find_run(home, name)
    diagnosis = read_diagnosis(run.folder)
    number = None if diagnosis.is_healthy else first_worthwhile(diagnosis)
    asked["recipe"] = run.recipe
    if number is None:
        out.say(f"{run.name} as it is: {diagnosis.headline}")
    else:
        lever = diagnosis.lever(number)
        asked["overrides"] = (*overrides_of(lever.change), *asked["overrides"])
        out.say(
            f"{run.name} with lever {number} applied: {lever.title} ({lever.sets}), predicted {lever.speedup:.2f} × in "
            f"{lever.of} on what was measured\napply:   armillary diagnose {run.name} --apply {number}"
        )
    return "serve" if diagnosis.kind == "serving" else "train"
