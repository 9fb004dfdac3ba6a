"""`armillary bench serve`: what the inference engine reaches with a model on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli import completion
from armillary.cli.open_model import find_model, open_model
from armillary.cli.output import Output
from armillary.cli.verb_decorator import model_code_option, verb
from armillary.errors import BadInput
from armillary.store.home import Home
from armillary.units import bandwidth_text, seconds_text

if TYPE_CHECKING:
    from armillary.engine.bench.bench import Notes, ServeBench
    from armillary.model.transformer import Transformer
    from armillary.spec.recipe import Recipe
    from armillary.store.runs import Run

_BATCHES = 6
"""a sixth of the requests runs at a time: with all of them at once, batching modes would not differ"""


@verb
@click.argument("model", shell_complete=completion.models)
@click.option("--mode", "modes", multiple=True, help="none, static, dynamic, continuous; repeatable.  [default: all]")
@click.option("--requests", default=48, show_default=True, help="Requests per run.")
@click.option("--tokens-in", default=64, show_default=True, help="Longest prompt.")
@click.option("--tokens-out", default=96, show_default=True, help="Longest completion.")
@click.option("--dtype", help="fp32, bf16 or fp16.  [default: as serve.dtype=auto resolves it]")
@click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
@click.option("--weights", type=click.Choice(["auto", "int8", "fp8"]), default="auto", help="Quantise the weights.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write bars there: .html or .svg.")
@model_code_option
def serve(
    out: Output,
    home: Home,
    model: str,
    modes: tuple[str, ...],
    requests: int,
    tokens_in: int,
    tokens_out: int,
    dtype: str | None,
    device: str | None,
    weights: str,
    plot: Path | None,
) -> None:
    """Serve random requests with MODEL: a single stream, then every batching mode on the same requests.

    A shape that has no weights gets random ones. A run folder holds what was recorded of continuous batching (of the
    last mode, where that is not among them), for armillary diagnose.
    """
    if min(requests, tokens_in, tokens_out) < 1:
        raise BadInput("requests and tokens must be at least 1; give larger numbers")
    random = find_model(out, home, model, need_weights=False).folder is None
    source, loaded = open_model(out, home, model, random_weights=random, dtype=dtype, device=device, packed=True)
    if tokens_in + tokens_out > loaded.config.context:
        raise BadInput(
            f"{tokens_in} + {tokens_out} tokens exceed the context of {source.name}; ask for at most "
            f"{loaded.config.context} together"
        )
    from armillary.cli.serve_run_folder import recorded
    from armillary.engine.bench.bench import bench_serve
    from armillary.profiling.ceilings.ceilings import name_of
    from armillary.profiling.dtypes.choice import Resolved
    from armillary.store.peaks import load_peaks

    chosen = _chosen(modes)
    notes: dict[str, Notes] = {}
    shown = "continuous" if "continuous" in chosen else chosen[-1]
    asked = _asked(loaded, shown, weights, max_running=-(-requests // _BATCHES), longest=tokens_in + tokens_out)
    dtypes = Resolved(dtype=asked.layout.precision)
    with recorded(home, source, asked, dtype=dtypes, device=device, say=out.say) as run:
        bench = bench_serve(
            loaded,
            asked.serve,
            modes=chosen,
            requests=requests,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            on_records=notes.__setitem__,
            peaks=load_peaks(home, name_of(next(loaded.parameters()).device)),
        )
        if run is not None:
            _write(run, notes[shown])
    if plot is not None:
        _plot(plot, bench)
    _show(out, bench)
    rows = [asdict(mode) | {"tokens_per_s": mode.tokens_per_s} for mode in bench.modes]
    quiet = [f"{mode.name}\t{mode.tokens_per_s:.1f}" for mode in bench.modes]
    result = asdict(bench) | {"modes": rows, "run": run.name if run is not None else None}
    result["together"] = result.pop("max_running")
    out.result(result, quiet=quiet)


def _chosen(modes: tuple[str, ...]) -> tuple[str, ...]:
    from armillary.engine.bench.bench import MODES

    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise BadInput(f"no batching mode '{unknown[0]}'; use one of {', '.join(MODES)}")
    return modes or tuple(MODES)


def _asked(loaded: Transformer, mode: str, weights: str, *, max_running: int, longest: int) -> Recipe:
    from armillary.kernels.core.dtype import DTYPES
    from armillary.spec.recipe import recipe_from_dict

    dtype = next(name for name, kind in DTYPES.items() if kind == next(loaded.parameters()).dtype)
    keys: dict[str, Any] = {
        "weights": weights,
        "dtype": dtype,
        "max_running": max_running,
        "max_model_len": longest,
        "batching": mode,
    }
    return recipe_from_dict({"model": {"name": loaded.config.name}, "serve": keys, "layout": {"precision": dtype}})


def _write(run: Run, notes: Notes) -> None:
    from armillary.store.gauges import GaugeWriter

    with GaugeWriter(run.gauges) as writer:
        for at, gauges, step, request in notes.records:
            writer.write(gauges, step=step, request=request, now=at)


def _plot(path: Path, bench: ServeBench) -> None:
    from armillary.engine.bench.bench_page import bench_page, picture
    from armillary.store.atomic import write_text

    write_text(path, picture(bench) if path.suffix == ".svg" else bench_page(bench))


def _show(out: Output, bench: ServeBench) -> None:
    from armillary.engine.bench.bench_page import COLUMNS, cells, workload

    single, rate = bench.single, bench.single.decode_tokens_per_s
    out.say(f"{bench.model} on {bench.device}, {bench.dtype}")
    out.say(
        f"single stream: {single.tokens_in} in {seconds_text(single.ttft_p50_s)}, then {rate:,.1f} tokens/s = "
        f"{bandwidth_text(bench.single_bytes_per_s)}"
    )
    out.table(workload(bench), list(COLUMNS), list(map(cells, bench.modes)))
