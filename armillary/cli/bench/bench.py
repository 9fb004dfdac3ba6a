"""`armillary bench`: measure what this machine reaches (ceilings, memory, collectives, loader, kernels), as peaks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.bench.kernels import kernels
from armillary.cli.bench.memory import memory
from armillary.cli.bench.serve import serve
from armillary.cli.bench.tables import bests, shares, show_peaks
from armillary.cli.data import on_bar as on_bytes
from armillary.cli.data import say_prepared
from armillary.cli.open_model import pick_torch_device
from armillary.cli.output import Output
from armillary.cli.progress import on_bar
from armillary.cli.verb_decorator import VerbGroup, device_option, quick_option
from armillary.errors import ArmillaryError, BadInput, NotFound
from armillary.store.home import Home
from armillary.store.peaks import Peaks, load_peaks, new_peaks, peaks_path, save_peaks
from armillary.units import bandwidth_text, bytes_text, parse_count, scaled, seconds_text

if TYPE_CHECKING:
    import torch

    from armillary.cli.bench.loader import TrainingBatches
    from armillary.profiling.ceilings.data_loader import LoaderSpeed

ENGINE_S = 30.0
"""how long a small engine may take to start and to answer"""
_LEAST_ENGINE_S = 1.0
"""seconds left below which no engine is started"""

bench = VerbGroup("bench", help="Measure what this machine can reach, and store it as peaks.")
bench.add_command(kernels)
bench.add_command(memory)
bench.add_command(serve)


@bench.verb
@device_option
@quick_option
@click.option(
    "--only",
    multiple=True,
    metavar="SECTION",
    help="bandwidth, gemm, attention, passes, fma, launch, host_copy, disk; repeatable.",
)
@click.option("--folder", type=click.Path(path_type=Path), help="Whose disk is measured.  [default: this folder]")
@click.option("--show", is_flag=True, help="Print what is stored, measure nothing.")
def ceilings(
    out: Output, home: Home, device: str | None, quick: bool, only: tuple[str, ...], folder: Path | None, show: bool
) -> None:
    """Measure memory, GEMMs, launches, host copies and the disk.

    Random data, rotating buffers, the median of many repeats. A minute on a CPU, a few on a GPU; --quick takes seconds.
    """
    target = pick_torch_device(device)
    from armillary.machine.cores import BUSY_CORES
    from armillary.profiling.ceilings.ceilings import measure_ceilings, name_of

    if show:
        return _answer(out, _stored(home, name_of(target)))
    where = folder or Path.cwd()
    if not where.is_dir():
        raise NotFound(f"no folder {where} to measure the disk of; give --folder DIR")
    with out.progress("measuring", unit="case") as bar:
        measured = measure_ceilings(target, quick=quick, folder=where, only=only, watch=on_bar(bar))
    save_peaks(home, measured.peaks)
    if target.type == "cpu" and not only:
        measure_engine(out, home, ENGINE_S)
    if target.type == "cpu" and (measured.other_cores or 0) > BUSY_CORES:
        out.warn(
            f"other work kept {measured.other_cores:.1f} cores busy, so these figures are too low; measure again when "
            "the machine is quiet"
        )
    if measured.skipped:
        out.warn(f"{measured.skipped} cases were left out when the time was over; --only SECTION measures some")
    _answer(out, measured.peaks)
    out.say(f"\nmeasured in {seconds_text(measured.seconds)}, kept in {peaks_path(home, measured.peaks.device)}")


@bench.verb
@device_option
@quick_option
@click.option("--world", "worlds", multiple=True, type=int, help="Ranks; repeatable.  [default: 2, 4 … devices]")
@click.option("--op", "ops", multiple=True, help="all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send.")
@click.option("--size", "sizes", multiple=True, help="Bytes, like 4MiB; at least two.  [default: 1 kiB to 64 MiB]")
def collectives(
    out: Output,
    home: Home,
    device: str | None,
    quick: bool,
    worlds: tuple[int, ...],
    ops: tuple[str, ...],
    sizes: tuple[str, ...],
) -> None:
    """Measure collectives between local ranks and fit latency and bandwidth.

    gloo between processes on a CPU, NCCL between GPUs.
    """
    target = pick_torch_device(device)
    from armillary.machine.cores import usable_cores
    from armillary.profiling.ceilings.collective_ranks import OPS
    from armillary.profiling.ceilings.collectives import QUICK_SIZES, SIZES, default_worlds, measure_collectives

    chosen = worlds or default_worlds(target, usable_cores())
    if not chosen:
        raise BadInput("collectives need two GPUs and there is one; use --device cpu")
    spans = tuple(map(parse_count, sizes)) or (QUICK_SIZES if quick else SIZES)
    with out.progress("measuring", unit="case") as bar:
        measured = measure_collectives(
            target,
            worlds=chosen,
            ops=ops or tuple(OPS),
            sizes=spans,
            budget_s=0.05 if quick else 0.15,
            watch=on_bar(bar),
        )
    save_peaks(home, measured.peaks)
    _say_times(out, measured.peaks)
    _answer(out, measured.peaks)


@bench.verb
@click.argument("data", required=False, type=click.Path(path_type=Path))
@device_option
@quick_option
@click.option("--sequence", default=512, show_default=True, help="Tokens in a row.")
@click.option("--batch", default=32, show_default=True, help="Rows in a batch.")
@click.option("--workers", "workers", multiple=True, type=int, help="Loader processes; repeatable.  [default: 0, 1, 2]")
def loader(
    out: Output,
    home: Home,
    data: Path | None,
    device: str | None,
    quick: bool,
    sequence: int,
    batch: int,
    workers: tuple[int, ...],
) -> None:
    """Measure how fast the data path feeds a trainer.

    DATA is a folder of prepared shards (armillary data prepare); without it the standard library is prepared.
    """
    target = pick_torch_device(device)
    from armillary.cli.bench.loader import TrainingBatches
    from armillary.profiling.ceilings.ceilings import about, name_of

    if any(count < 0 for count in workers):
        raise BadInput("a loader cannot have fewer than no workers; use --workers 0 or more")
    reading = TrainingBatches(folder=(data or _prepared(out, home)).absolute(), sequence=sequence, batch=batch)
    reading.open()  # refused now where too small
    counts = workers or ((0, 1) if quick else (0, 1, 2))
    with out.progress("measuring", unit="way") as bar:
        paths = _paths_fed(reading, counts, on_bar(bar), device=target, budget_s=0.5 if quick else 2.0)
    points = [_loader_point(path, speed, sequence * batch) for path, rates in paths.items() for speed in rates]
    peaks = new_peaks(name_of(target), about(target)).with_points("loader", points)
    save_peaks(home, peaks)
    best = max(paths["loader"], key=lambda speed: speed.tokens_per_s)
    show_peaks(out, peaks)
    out.say(
        f"\nbest: {best.settings.text()}, {scaled(best.tokens_per_s)} tok/s; "
        "a trainer that is faster will wait for data"
    )
    out.result(_as_json(peaks), quiet=f"{best.tokens_per_s:.0f}")


# --- parts


def _stored(home: Home, device: str) -> Peaks:
    peaks = load_peaks(home, device)
    if peaks is None:
        raise NotFound(f"nothing was measured on {device} yet; run armillary bench ceilings")
    return peaks


def _answer(out: Output, peaks: Peaks) -> None:
    show_peaks(out, peaks)
    out.result(_as_json(peaks), quiet=_quiet(peaks))


def _as_json(peaks: Peaks) -> dict[str, Any]:
    return {
        "device": peaks.device,
        "date": peaks.date,
        "about": peaks.about,
        "of_catalogue": shares(peaks),
        "points": peaks.points,
    }


def _quiet(peaks: Peaks) -> list[str]:
    """The best of each, one per line: 'gemm bf16 7.9e+14'."""
    lines = []
    for kind in peaks.points:
        if kind in ("gemm", "fma"):
            lines += [f"{kind} {name} {best:.4g}" for name, best in bests(peaks, kind)]
        elif kind in ("copy", "read", "write", "triad", "passes", "disk", "host_copy"):
            lines += [f"{kind} {best:.4g}" for _, best in bests(peaks, kind)]
        elif kind == "collective":
            lines += [f"{p['op']} {p['world']} {p['alpha_s']:.4g} {p['bytes_per_s']:.4g}" for p in peaks.points[kind]]
        elif kind == "attention":
            lines += [
                f"attention {'backward' if p['backward'] else 'forward'} {p['flops']:.4g}" for p in peaks.points[kind]
            ]
        elif kind == "launch":
            lines += [f"launch {point['mode']} {point['seconds']:.4g}" for point in peaks.points[kind]]
    return lines


def _say_times(out: Output, peaks: Peaks) -> None:
    rows = [
        [
            p["op"].replace("_", " "),
            p["world"],
            bytes_text(p["bytes"]),
            seconds_text(p["seconds"]),
            bandwidth_text(p["beside"]["algorithm_bytes_per_s"]),
            bandwidth_text(p["beside"]["bus_bytes_per_s"]),
            f"{50 * p['beside']['spread']:.1f}%",
        ]
        for p in peaks.points["collective_time"]
    ]
    out.table("", ["operation", "ranks", "size", "time", "algorithm", "bus", "spread"], rows)
    out.say()


def _prepared(out: Output, home: Home) -> Path:
    from armillary.training.data.corpus import STDLIB
    from armillary.training.prepare_data import folder_name, prepare

    with out.progress("preparing", unit="B") as bar:
        prepared = prepare(STDLIB, home.data / folder_name(STDLIB), progress=on_bytes(bar))
    say_prepared(out, prepared)
    return prepared.folder


def _paths_fed(
    reading: TrainingBatches, workers: Sequence[int], watch: Any, *, device: torch.device, budget_s: float
) -> dict[str, list[LoaderSpeed]]:
    """Rates of plain reads of the files, and of batches from this process, torch's workers and training's loader."""
    from armillary.cli.bench.loader import PlainReads, through_loader
    from armillary.profiling.ceilings.data_loader import LoaderSettings, measure_loader

    there = device.type == "cuda"
    measured: dict[str, Any] = {"device": device, "budget_s": budget_s}
    configurations = [LoaderSettings(workers=count, pinned=there, to_device=there) for count in workers]
    plain = PlainReads(folder=reading.folder, sequence=reading.sequence, batch=reading.batch)
    return {
        "plain mmap": measure_loader(plain, [LoaderSettings()], **measured),
        "batches": measure_loader(reading, [LoaderSettings()], **measured),
        "torch DataLoader": measure_loader(
            reading, [settings for settings in configurations if settings.workers], **measured
        ),
        "loader": measure_loader(reading, configurations, **measured, watch=watch, feed=through_loader),
    }


def _loader_point(path: str, speed: LoaderSpeed, tokens: int) -> dict[str, Any]:
    return {
        "path": path,
        "tokens": tokens,
        "workers": speed.settings.workers,
        "prefetch": speed.settings.prefetch,
        "pinned": speed.settings.pinned,
        "to_device": speed.settings.to_device,
        "seconds": speed.seconds,
        "beside": {
            "tokens_per_s": speed.tokens_per_s,
            "bytes_per_s": speed.bytes_per_s,
            "batches": speed.batches,
            "date": time.strftime("%Y-%m-%d"),
        },
    }


def measure_engine(out: Output, home: Home, limit_s: float) -> None:
    """Calibrate the planner with a small engine; without it, plans are less exact."""
    from armillary.planning.calibrate.engine_calibration import calibrate

    if limit_s < _LEAST_ENGINE_S:
        return out.warn(
            "torch calls were not timed, so plans for this CPU are rough: the time for measuring was over; armillary "
            "bench ceilings times them"
        )
    try:
        with out.progress("measuring a small engine"):
            calibrate(home, limit_s)
    except ArmillaryError as error:
        out.warn(f"torch calls were not timed, so plans for this CPU are rough: {error}")
