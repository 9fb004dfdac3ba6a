"""`armillary train`: the model of a recipe, trained with a progress bar and a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli.data import on_bar, say_prepared
from armillary.cli.find_model import find_model
from armillary.cli.open_model import need_torch
from armillary.cli.output import Output, path_text
from armillary.cli.verb import set_option, verb
from armillary.spec.recipe import Recipe, load_recipe
from armillary.store.home import Home
from armillary.units import bytes_text, count_text, scaled

if TYPE_CHECKING:
    from armillary.training.loop import StepReport, Trained
    from armillary.training.start import Start


@verb
@click.argument("recipe", type=click.Path(path_type=Path))
@set_option
@click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
@click.option("--random-weights", is_flag=True, help="Take only the shape of a model that has weights.")
@click.option("--dry-run", is_flag=True, help="Check everything and stop before anything is written.")
def train(
    out: Output,
    home: Home,
    recipe: Path,
    overrides: tuple[str, ...],
    device: str | None,
    random_weights: bool,
    dry_run: bool,
) -> None:
    """Train the model of RECIPE and export it as a Hugging Face folder.

    A name of the catalogue starts from scratch; a folder, a run or a Hub id goes on from its weights.

    Ctrl-C stops after the current step and keeps what was learnt.
    """
    loaded = load_recipe(recipe, overrides)
    begun = begin(out, home, loaded, random_weights=random_weights, device=device)
    say_start(out, begun)
    if dry_run:
        out.result({"plan": begun.plan})
        return
    done = run_training(out, begun, text=recipe.read_text(), overrides=overrides, device=device)
    out.result(summary(done), quiet=done.run.id)


def begin(out: Output, home: Home, recipe: Recipe, *, random_weights: bool = False, device: str | None = None) -> Start:
    """Find the model, fetching its weights if it must, and check everything."""
    need_torch("training")
    from armillary.model.device import pick_device
    from armillary.training.start import start, starting_point

    source = find_model(out, home, recipe.model.source, need_weights=False)
    if source.origin == "hub" and not random_weights:
        find_model(out, home, recipe.model.source, need_weights=True)
    begun = start(recipe, home, starting_point(recipe, home, random_weights=random_weights))
    pick_device(device)
    for note in begun.plan.notes:
        out.warn(note)
    return begun


def run_training(out: Output, begun: Start, *, text: str, overrides: tuple[str, ...], device: str | None) -> Trained:
    """Prepare, train with a bar, and say how it ended."""
    from armillary.training.loop import train as library_train

    with out.progress("preparing", unit="B") as bar:
        made = begun.prepare(on_bar(bar))
    say_prepared(out, made)
    run = begun.create_run(text=text, overrides=overrides)
    job = begun.recipe.train
    out.say(f"run {run.id} · {job.steps:,} steps of {count_text(job.batch_tokens)} tokens · Ctrl-C stops and keeps")
    shown: dict[str, object] = {}
    with out.progress("train", total=job.steps, unit="step") as bar:

        def watch(report: StepReport) -> None:
            shown.update(live(report))
            bar.update(1, **shown)

        done = library_train(begun.plan, run, device=device, watch=watch)
    say_end(out, done)
    return done


def live(report: StepReport) -> dict[str, object]:
    """What stands beside the bar."""
    gauges = report.gauges
    fields: dict[str, object] = {"loss": f"{gauges['loss']:.3f}"}
    if "val_loss" in gauges:
        fields["val"] = f"{gauges['val_loss']:.3f}"
    fields["speed"] = f"{scaled(gauges['tokens_per_s_per_device'])} tok/s"
    fields["memory"] = bytes_text(gauges.get("memory_peak_bytes") or gauges["host_memory_bytes"])
    return fields


def say_start(out: Output, begun: Start) -> None:
    from armillary.spec.params import parameters

    plan = begun.plan
    origin = f"from the weights in {path_text(Path(plan.weights))}" if plan.weights else "from scratch"
    count = count_text(parameters(plan.model).total)
    out.say(f"{plan.model.name} on {plan.cluster.text()} · {count} parameters · {plan.layout.precision} · {origin}")


def say_end(out: Output, done: Trained) -> None:
    how = "finished" if done.finished else "stopped"
    val = f" · held-out loss {done.val_loss:.3f}" if done.val_loss is not None else ""
    out.say(f"{how} after {done.steps:,} steps · loss {done.loss:.3f}{val}")
    out.say(f"exported {path_text(done.export)}")
    out.say(f'next: armillary generate {done.run.name} "def main"')


def summary(done: Trained) -> dict[str, object]:
    return {
        "run": done.run.id,
        "steps": done.steps,
        "finished": done.finished,
        "loss": done.loss,
        "val_loss": done.val_loss,
        "export": str(done.export),
    }
