"""`armillary bench serve`: what the inference engine reaches with a model on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli import complete
from armillary.cli.open_model import open_model
from armillary.cli.output import Output
from armillary.cli.verb import verb
from armillary.errors import BadInput
from armillary.store.home import Home
from armillary.units import bandwidth_text, seconds_text

if TYPE_CHECKING:
    from armillary.serving.bench import ServeBench

_BATCHES = 6
"""a sixth of the requests runs at a time: with all of them together, ways of batching would not differ"""


@verb
@click.argument("model", shell_complete=complete.models)
@click.option("--mode", "modes", multiple=True, help="none, static, dynamic, continuous; often.  [default: all]")
@click.option("--requests", default=48, show_default=True, help="Requests of a run.")
@click.option("--tokens-in", default=64, show_default=True, help="Longest prompt.")
@click.option("--tokens-out", default=96, show_default=True, help="Longest answer.")
@click.option("--dtype", help="fp32, bf16 or fp16.  [default: as stored]")
@click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
@click.option("--weights", type=click.Choice(["auto", "int8", "fp8"]), default="auto", help="Round the weights.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write bars there: .html or .svg.")
def serve(
    out: Output, home: Home, model: str, modes: tuple[str, ...], requests: int, tokens_in: int, tokens_out: int,
    dtype: str | None, device: str | None, weights: str, plot: Path | None,
) -> None:  # fmt: skip
    """Serve random requests with MODEL: a single stream, then every batching mode on the same requests.

    A shape that has no weights gets random ones.
    """
    if min(requests, tokens_in, tokens_out) < 1:
        raise BadInput("requests and tokens must be at least 1; give larger numbers")
    source, loaded = _opened(out, home, model, dtype, device)
    if tokens_in + tokens_out > loaded.config.context:
        raise BadInput(f"{tokens_in} + {tokens_out} tokens exceed the context of {source}; ask for at most "
                       f"{loaded.config.context} together")  # fmt: skip
    from armillary.serving.bench import MODES, bench_serve
    from armillary.serving.bench_plot import bench_page, picture
    from armillary.spec.service import Serve
    from armillary.store.atomic import write_text

    unknown_modes = [mode for mode in modes if mode not in MODES]
    if unknown_modes:
        raise BadInput(f"no batching mode '{unknown_modes[0]}'; use one of {', '.join(MODES)}")
    found = bench_serve(
        loaded, Serve(weights=weights, max_running=-(-requests // _BATCHES)),  # type: ignore[arg-type]
        modes=modes or MODES, requests=requests, tokens_in=tokens_in, tokens_out=tokens_out,
    )  # fmt: skip
    if plot is not None:
        write_text(plot, picture(found) if plot.suffix == ".svg" else bench_page(found))
    _show(out, found)
    rows = [asdict(mode) | {"tokens_per_s": mode.tokens_per_s} for mode in found.modes]
    quiet = [f"{mode.name}\t{mode.tokens_per_s:.1f}" for mode in found.modes]
    out.result(asdict(found) | {"modes": rows}, quiet=quiet)


def _opened(out: Output, home: Home, model: str, dtype: str | None, device: str | None):  # type: ignore[no-untyped-def]
    from armillary.cli.find_model import find_model

    random = find_model(out, home, model, need_weights=False).folder is None
    source, loaded = open_model(out, home, model, random_weights=random, dtype=dtype, device=device)
    return source.name, loaded


def _show(out: Output, found: ServeBench) -> None:
    from armillary.serving.bench_plot import COLUMNS, cells, workload

    one, rate = found.single, found.single_tokens_per_s
    out.say(f"{found.model} on {found.device}, {found.dtype}")
    out.say(f"single stream: {one.tokens_in} in {seconds_text(one.ttft_p50_s)}, then {rate:,.1f} tokens/s = "
            f"{bandwidth_text(found.single_bytes_per_s)}")  # fmt: skip
    out.table(workload(found), list(COLUMNS), list(map(cells, found.modes)))
