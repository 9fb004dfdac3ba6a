"""`armillary bench memory`: latencies of caches and memory with the levels found in them, BLAS 1 to 3, storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.open_model import pick_torch_device
from armillary.cli.output import Output
from armillary.cli.progress import on_bar
from armillary.cli.verb_decorator import device_option, quick_option, verb
from armillary.errors import BadInput, NotFound, unknown
from armillary.store.home import Home
from armillary.store.peaks import peaks_path, save_peaks
from armillary.units import bandwidth_text, bytes_text, flops_per_s_text, seconds_text

if TYPE_CHECKING:
    from armillary.profiling.memory.measure import MemoryBench


@verb
@device_option
@quick_option
@click.option("--only", multiple=True, metavar="SECTION", help="latency, translation, units, blas, storage; many.")
@click.option(
    "--folder", "folders", multiple=True, type=click.Path(path_type=Path), help="Also a tier of storage; repeatable."
)
@click.option(
    "--to",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep memory.html and memory.json there, part by part.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a page of curves (HTML) there.")
def memory(
    out: Output,
    home: Home,
    device: str | None,
    quick: bool,
    only: tuple[str, ...],
    folders: tuple[Path, ...],
    to: Path | None,
    plot: Path | None,
) -> None:
    """Measure latencies, find caches and TLBs in them, place BLAS under a roof.

    Chains of dependent loads over growing working sets; sizes are found in the curves, not asked of the system.
    """
    if plot is not None and plot.suffix not in (".html", ".htm"):
        raise BadInput(f"what is drawn is a page of HTML; try --plot {plot.with_suffix('.html')}")
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        raise NotFound(f"no folder {missing} to measure; give --folder DIR")
    target = pick_torch_device(device)
    from armillary.kernels.core.requirements import lacking
    from armillary.profiling.memory.measure import SECTIONS, measure_memory
    from armillary.profiling.memory.page import memory_page
    from armillary.store.atomic import write_json, write_text

    def keep(bench: MemoryBench) -> None:
        save_peaks(home, bench.peaks)
        if to is not None:
            to.mkdir(parents=True, exist_ok=True)
            write_json(to / "memory.json", as_json(bench))
            write_text(to / "memory.html", memory_page(bench))

    for name in only:
        if name not in SECTIONS:
            raise unknown("section", name, SECTIONS)
    if target.type == "cuda" and (why := lacking(("triton",), target.type)):
        raise BadInput(f"a GPU's latencies are measured by inline PTX and {why}; take --device cpu")
    with out.progress("measuring", unit="point") as bar:
        bench = measure_memory(
            target, quick=quick, folders=(*folders, Path.cwd()), only=only or SECTIONS, watch=on_bar(bar), save=keep
        )
    if plot is not None:
        write_text(plot, memory_page(bench))
    show(out, bench)
    for part, why in bench.failed.items():
        out.warn(f"{part} was not measured to its end: {why}")
    where = peaks_path(home, bench.peaks.device)
    out.say(
        f"\nmeasured in {seconds_text(bench.seconds)}, kept in {where}"
        + (f", drawn in {plot}" if plot else "")
        + (f", with curves in {to}" if to else "")
    )
    levels = [f"{point['level']}\t{point['seconds']:.4g}" for point in bench.peaks.points.get("latency", ())]
    out.result(as_json(bench), quiet=levels)


def as_json(bench: MemoryBench) -> dict[str, Any]:
    curves = {name: curve for name, (curve, _) in bench.curves.items()}
    return {
        "device": bench.peaks.device,
        "seconds": round(bench.seconds, 1),
        "points": dict(bench.peaks.points),
        "curves": curves,
        "failed": bench.failed,
    }


def show(out: Output, bench: MemoryBench) -> None:
    from armillary.machine.cores import BUSY_CORES
    from armillary.profiling.memory.page import latency_text, tier_rows
    from armillary.profiling.memory.published import compared

    points = bench.peaks.points
    if results := points.get("latency"):
        rows = [
            [
                point["level"],
                latency_text(point["seconds"]),
                None if point["resident_bytes"] is None else bytes_text(point["resident_bytes"]),
                point["beside"].get("pages"),
            ]
            for point in results
        ]
        out.table("latency of a load", ["level", "latency", "holds", "pages"], rows)
    if against := compared(bench.peaks):
        rows = [[each.level, each.measured, each.range_text, "yes" if each.within else "no"] for each in against]
        out.table("beside published values", ["level", "measured", "published", "within"], rows)
    if results := points.get("sync"):
        rows = [[p["what"], p["threads"], latency_text(p["seconds"]), p["beside"].get("cycles")] for p in results]
        out.table("instructions, atomics, barriers", ["what", "threads", "each", "cycles"], rows)
    if results := points.get("blas"):
        rows = [
            [
                p["op"],
                p["by"],
                bytes_text(p["bytes"]) if "bytes" in p else f"{p['n']:,}",
                flops_per_s_text(p["flops"]),
                bandwidth_text(p["bytes_per_s"]),
            ]
            for p in results
        ]
        out.table("BLAS 1, 2 and 3", ["operation", "by", "size", "FLOP/s", "bytes/s"], rows)
    if points.get("disk"):
        out.table("storage tiers", ["tier", "holds", "latency", "reads", "writes"], tier_rows(bench.peaks))
    if (bench.other_cores or 0) > BUSY_CORES:
        out.warn(
            f"other work kept {bench.other_cores:.1f} cores busy: levels that cores share look smaller and slower; "
            "measure again when the machine is quiet"
        )
