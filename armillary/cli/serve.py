"""`armillary serve`: a model behind an OpenAI-compatible HTTP server."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click

from armillary.cli import completion
from armillary.cli.open_model import find_model
from armillary.cli.output import Output
from armillary.cli.verb_decorator import model_code_option, moved, set_option, verb
from armillary.errors import BadInput, missing
from armillary.spec.hf.user_family import loaded_files
from armillary.spec.recipe import Recipe, load_recipe, recipe_from_dict
from armillary.store.home import Home

_AROUND_ROUTES = tuple(
    f"serve.{key}=" for key in ("api_key_file", "access_log", "cors_origins", "root_path", "tls_certificate", "tls_key")
)
"""keys of [serve] that the server of a model file has too"""


@verb
@click.argument("model", shell_complete=completion.models)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
@click.option("--tp", type=click.IntRange(1), help="Devices that shard the model, or each of its stages.  [default: 1]")
@click.option("--devices", type=click.IntRange(1), help="Devices, which the planner divides into --tp and serve.pp.")
@click.option("--trust", is_flag=True, help="Serve a model file that armillary convert did not write here.")
@click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
@click.option("--recipe", type=click.Path(path_type=Path, dir_okay=False), help="Take its [serve] table.")
@set_option
@model_code_option
@moved("--max-model-len", "try --set serve.max_model_len=4096")
@moved("--metrics", "try --set serve.metrics=vllm")
@moved("--fp8", "try --set serve.weights=fp8", is_flag=True)
@moved("--name", "try --set serve.name=…")
@moved("--kv-dtype", "try --set serve.kv_dtype=fp8")
@moved("--dtype", "try --set serve.dtype=bf16")
@moved("--api-key-file", "try --set serve.api_key_file=…")
@moved("--tools", "try --set serve.tools=hermes")
@moved("--otlp", "try --set serve.otlp=http://…")
def serve(
    out: Output,
    home: Home,
    model: str,
    host: str,
    port: int,
    tp: int | None,
    devices: int | None,
    trust: bool,
    device: str | None,
    recipe: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Serve MODEL to OpenAI's clients: chats, completions, tools, structures; a chat page at /.

    MODEL is a Hugging Face folder, a GGUF file, a Hub id, a run or a release. With registry:NAME@ALIAS, a version
    that is promoted to the alias later replaces the one that serves, without dropping a request.

    SIGTERM lets requests in flight finish. The rest is keys of [serve], like limits and API keys: --set
    serve.max_model_len=4096, --set serve.max_waiting=100, --set serve.api_key_file=keys.txt, --set serve.name=…
    (for clients), --set serve.dtype=bf16, --set serve.speculate=ngram, --set serve.pp=2
    (stages of layers), --set serve.ep=4 (groups of experts), --set serve.dp_attention=4 (copies of
    attention), --set serve.nodes=2@HOST:PORT (one engine on two nodes), --set serve.role=prefill
    or decode with --set serve.prefill=HOST:PORT (two servers for one model), --set
    serve.otlp=http://….

    A model file (.pt2, .pt, .onnx), or a folder of numbered versions of one, is served at /predict with dynamic
    batching. A .pt2 or .pt can hold code: one that armillary convert did not write here needs --trust.
    """
    from armillary.serving.predict.versions import is_model_file

    if is_model_file(Path(model)):
        return serve_file(
            out, home, Path(model), host=host, port=port, device=device, recipe=recipe, overrides=overrides, trust=trust
        )
    if trust:
        raise BadInput("--trust is for model files; a model folder holds no code, leave it out")
    asked = _asked(recipe, overrides)
    if find_spec("torch") is None:  # the engine's process imports it, not this one
        raise missing("torch", "serving a model", "torch")
    if asked.serve.emulate and not asked.serve.nodes:
        from armillary.cli.serving.serve_emulated import serve_emulated

        return serve_emulated(out, home, model, asked, host=host, port=port)
    source = find_model(out, home, model, need_weights=True, trusted_keys=asked.serve.trusted_keys)
    if asked.serve.draft:
        drafts = find_model(out, home, asked.serve.draft, need_weights=True, trusted_keys=asked.serve.trusted_keys)
        asked = replace(asked, serve=replace(asked.serve, draft=str(drafts.folder)))
    from armillary.cli.serve_run_folder import choose_layout, recorded, resolve_dtype, resolve_threads
    from armillary.cli.serving.serve_nodes import node_place, refuse_on_nodes, run_node
    from armillary.profiling.dtypes.choice import with_dtype
    from armillary.serving.http.server import bind, listen_options
    from armillary.serving.openai.promotion import followed_alias
    from armillary.serving.openai.run_server import serve as run
    from armillary.serving.processes.engine_ipc import EngineConfig

    say = partial(click.echo, err=out.mode != "human")
    follow = followed_alias(home, model, source, asked.serve)
    if follow is not None and asked.serve.role != "combined":
        raise BadInput(f"serve.role={asked.serve.role} serves one version; name it, or set serve.registry_poll_s=0")
    if follow is not None:  # clients keep one name while versions change
        source = replace(source, name=follow.release.name)
    place = node_place(asked.serve)
    listen = listen_options(host, port, asked.serve)
    if not place.rank:
        bind(listen).close()  # a port in use is said before there is a run
    dtype = resolve_dtype(home, source, asked, device)
    say(dtype.warning or f"dtype {dtype.reason or f'{dtype.dtype}: as asked'}")
    if devices is not None:
        if tp is not None or asked.serve.pp > 1 or place.count > 1:
            raise BadInput("--devices is divided by the planner; leave out --tp, serve.pp and serve.nodes, or it")
        tp, serve_table = choose_layout(home, source, asked, dtype, devices=devices, device=device, say=say)
        asked = replace(asked, serve=serve_table)
    tp = tp or 1
    ranks = asked.serve.ranks(tp)
    refuse_on_nodes(asked.serve, place, ranks, follows=follow is not None)
    threads = resolve_threads(home, source, asked, dtype, tp=tp, device=device, say=say)
    if threads is not None:
        say(f"threads {threads.reason or f'{threads.count}: as asked'}")
    settings = replace(with_dtype(asked.serve, dtype), threads=threads.count if threads else asked.serve.threads)
    config = EngineConfig(
        model=str(source.folder),
        serve=settings,
        home=home,
        device=device,
        model_code=loaded_files(),
        nodes=place,
    )
    if place.rank:
        return run_node(config, ranks, say)
    with recorded(
        home,
        source,
        asked,
        text=recipe.read_text() if recipe else "",
        overrides=overrides,
        tp=tp,
        dtype=dtype,
        threads=threads,
        device=device,
        say=say,
    ) as folder:
        config = replace(config, gauges=folder.gauges if folder else None)
        run(source, config, listen, ranks=ranks, follow=follow, say=say)


def _asked(recipe: Path | None, overrides: tuple[str, ...]) -> Recipe:
    """The recipe, then --set of [serve]."""
    for text in overrides:
        if not text.startswith("serve."):
            raise BadInput(f"--set {text} is not of [serve]; it reads that table alone, like serve.max_running=64")
    return load_recipe(recipe, overrides) if recipe else recipe_from_dict({"model": {"name": "any"}}, overrides)


def serve_file(
    out: Output,
    home: Home,
    path: Path,
    *,
    host: str,
    port: int,
    device: str | None,
    recipe: Path | None,
    overrides: tuple[str, ...],
    trust: bool = False,
) -> None:
    """Serve the model file, or folder of versions, at `path` with the recipe's [predict] table and [serve]'s keys."""
    from armillary.serving.http.server import listen_options
    from armillary.serving.predict.run_server import serve as run
    from armillary.serving.predict.trusted_files import FileTrust

    for text in overrides:
        if not text.startswith(("predict.", *_AROUND_ROUTES)):
            raise BadInput(f"--set {text} is not of [predict], the table for model files; like predict.max_batch=64")
    loaded = load_recipe(recipe, overrides) if recipe else recipe_from_dict({"model": {"name": "file"}}, overrides)
    settings = replace(loaded.predict, device=device) if device else loaded.predict
    run(
        path,
        settings,
        listen_options(host, port, loaded.serve),
        trust=FileTrust(home, every_file=trust),
        say=lambda text: click.echo(text, err=out.mode != "human"),
    )
