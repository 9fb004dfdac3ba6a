"""`armillary serve`: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from armillary.cli import complete
from armillary.cli.find_model import find_model
from armillary.cli.output import Output
from armillary.cli.verb import set_option, verb
from armillary.errors import ArmillaryError, BadInput, NotFound, missing
from armillary.spec.recipe import Recipe, load_recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.store.runs import Run
from armillary.store.source import ModelSource

Say = Callable[[str], None]


@verb
@click.argument("model", shell_complete=complete.models)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
@click.option("--name", help="What clients call the model.  [default: its own name]")
@click.option("--max-model-len", type=click.IntRange(1), help="Prompt and answer together.  [default: the context]")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1), help="Devices to cut the model over.")
@click.option("--fp8", is_flag=True, help="Round the layers' weights to fp8 (GPU).")
@click.option("--dtype", help="fp32, bf16 or fp16.  [default: as stored]")
@click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
@click.option("--api-key-file", type=click.Path(path_type=Path, dir_okay=False),
              help="File with one API key a line; without it anybody may ask.")  # fmt: skip
@click.option("--tools", type=click.Choice(["hermes", "llama3", "mistral"]),
              help="How tool calls are written.  [default: as the chat template says]")  # fmt: skip
@click.option("--otlp", metavar="URL", help="Send a trace of every request to this OpenTelemetry collector.")
@click.option("--recipe", type=click.Path(path_type=Path, dir_okay=False), help="Take its [serve] table.")
@set_option
def serve(
    out: Output, home: Home, model: str, host: str, port: int, name: str | None, max_model_len: int | None, tp: int,
    fp8: bool, dtype: str | None, device: str | None, api_key_file: Path | None, tools: str | None, otlp: str | None,
    recipe: Path | None, overrides: tuple[str, ...],
) -> None:  # fmt: skip
    """Serve MODEL to OpenAI's clients: chats, completions, tools, structures; a chat page at /.

    MODEL is a Hugging Face folder, a Hub id, a run or a release. SIGTERM lets requests under way finish.
    Limits are keys of [serve]: `--set serve.max_waiting=100`. A model file (.pt2, .pt, .onnx), or a folder of numbered
    versions of one, is served at /predict with dynamic batching.
    """
    from armillary.serving.predict.files import is_model_file

    if is_model_file(Path(model)):
        from armillary.cli.serve_file import serve_file

        return serve_file(out, Path(model), host=host, port=port, device=device, recipe=recipe, overrides=overrides)
    asked = _asked(recipe, overrides, max_model_len, fp8)
    _need_torch()
    source = find_model(out, home, model, need_weights=True)
    from armillary.serving.api.channel import Orders
    from armillary.serving.api.serve import Door
    from armillary.serving.api.serve import serve as run

    def say(text: str) -> None:
        click.echo(text, err=out.mode != "human")

    door = Door(host=host, port=port, name=name, keys=_keys(api_key_file), tools=tools, otlp=otlp)
    with _recorded(home, source, asked, text=recipe.read_text() if recipe else "", overrides=overrides, tp=tp,
                   dtype=dtype, say=say) as folder:  # fmt: skip
        orders = Orders(model=str(source.folder), serve=asked.serve, home=home, dtype=dtype, device=device,
                        gauges=folder.gauges if folder else None)  # fmt: skip
        run(source, orders, door, ranks=tp, say=say)


@contextmanager
def _recorded(home: Home, source: ModelSource, asked: Recipe, *, say: Say, **more: Any) -> Iterator[Run | None]:
    """A run folder for as long as the server is there; one that cannot be written is no reason not to serve."""
    from armillary.cli.serve_run import begin_run

    if not asked.model.path:
        asked = replace(asked, model=replace(asked.model, name="", path=str(source.folder)))
    try:
        made = begin_run(home, source, asked, **more)
    except (ArmillaryError, OSError) as error:
        say(f"nothing is recorded: {error}")
        yield None
        return
    say(f"run {made.name}: armillary diagnose {made.name} says what holds it back")
    try:
        yield made
    except BaseException as error:
        made.update(state="failed", error=" ".join(str(error).split()))
        raise
    made.update(state="finished")


def _asked(recipe: Path | None, overrides: tuple[str, ...], max_model_len: int | None, fp8: bool) -> Recipe:
    """The recipe, then flags, then --set of [serve]."""
    flags = [f"serve.max_model_len={max_model_len}"] if max_model_len else []
    flags += ["serve.weights=fp8"] if fp8 else []
    for text in overrides:
        if not text.startswith("serve."):
            raise BadInput(f"--set {text} is not of [serve]; it reads that table alone, like serve.max_running=64")
    given = [*flags, *overrides]
    return load_recipe(recipe, given) if recipe else recipe_from_dict({"model": {"name": "any"}}, given)


def _need_torch() -> None:
    """It is the engine's process that imports it, not this one."""
    if find_spec("torch") is None:
        raise missing("torch", "serving a model", "torch")


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    if not path.is_file():
        raise NotFound(f"no file {path}; write one API key a line into it")
    keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys:
        raise BadInput(f"{path} holds no API key; write one a line into it")
    return keys
