"""`armillary launch --check`: measure the nodes of a job before it starts, name outliers, keep the measured link."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli.main import BUG
from armillary.cli.output import Output
from armillary.errors import ArmillaryError
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.units import bytes_text, scaled, seconds_text

if TYPE_CHECKING:
    from armillary.cluster.job import Job
    from armillary.cluster.preflight import Verdict
    from armillary.parallel.consensus import Consensus
    from armillary.parallel.world import World
    from armillary.spec.hardware import Cluster
    from armillary.spec.layout import Layout
    from armillary.store.cluster_probe import ClusterProbe, LinkProbe, RankProbe
    from armillary.store.peaks import Peaks

POLL_S = 1.0
SHOWN_RANKS = 16
REPEAT_S, CHECK_S = 40.0, 60.0
"""for so long outliers are measured again: a busy machine disturbs some measurements, a slow part is slow in all; but
only while a check then takes at most 60 s. So long a rank also waits for another one"""


PRINTED, PRINTED_LINE = "-", "check: "
"""file name with which the result is printed, where ranks and this machine share no folder; how that line begins"""
_PRINTED = re.compile(rf"(?:[\w ]+ \| )?{PRINTED_LINE}({{.*}})")
"""such a line of a log, with its node in front where there are several"""


class CheckFailed(ArmillaryError):
    """The ranks of a check did not come to an end."""


# --- on a rank


def measure_rank(recipe: Recipe, file: Path) -> None:
    """Measure as one of the ranks that torchrun started; the main rank writes the file."""
    from armillary.parallel.world import join_world
    from armillary.store.cluster_probe import probe_text, write_probe
    from armillary.training.loop import make_consensus

    with join_world(timeout_s=CHECK_S) as world:
        probe = probe_undisturbed(recipe.layout, world, make_consensus(world), file.parent)
        if world.is_main and str(file) == PRINTED:
            print(f"{PRINTED_LINE}{probe_text(probe)}", flush=True)
        elif world.is_main:
            write_probe(file, probe)


def probe_undisturbed(layout: Layout, world: World, ranks: Consensus, folder: Path) -> ClusterProbe:
    """Measure until no rank or link is an outlier any more, or the time is up; every rank has all figures, so that all
    come to the same verdict."""
    from armillary.cluster.preflight import judge_probe
    from armillary.parallel.probe_ranks import probe_ranks
    from armillary.store.cluster_probe import best_of

    probe = last = probe_ranks(layout, world, ranks, folder)
    while not judge_probe(probe).is_healthy and ranks.broadcast(_may_repeat(probe.seconds, last.seconds)):
        last = probe_ranks(layout, world, ranks, folder)
        probe = best_of(probe, last)
    return probe


def _may_repeat(taken_s: float, last_s: float) -> bool:
    """Whether there is time to measure once more what took `last_s`."""
    return taken_s < REPEAT_S and taken_s + last_s < CHECK_S


# --- where it was asked for


def check_nodes(out: Output, home: Home, job: Job, recipe: Recipe, files: dict[str, str]) -> None:
    """Start the check's ranks, wait for them, and say what they measured."""
    from armillary.cli.plan.options import find_cluster
    from armillary.cluster.excluded_nodes import note_excluded
    from armillary.cluster.preflight import judge_probe
    from armillary.store.cluster_probe import read_probe

    result = _run(out, job, files)
    probe, cluster = read_probe(result), find_cluster(recipe)
    ceilings = _ceilings(home, probe, cluster)
    verdict = judge_probe(probe, cluster, ceilings)
    _say(out, probe, verdict, job)
    _say_unknown(out, sorted({rank.device for rank in probe.ranks} - set(ceilings)), cluster)
    note_excluded(job, verdict.excluded)
    if job.target != "local" and verdict.is_healthy:  # local nodes are one machine
        keep_links(home, probe, cluster)
    answer = {"healthy": verdict.is_healthy, "outliers": verdict.outliers, "excluded": verdict.excluded, "probe": probe}
    out.result(answer, quiet=[outlier.text for outlier in verdict.outliers])
    if not verdict.is_healthy:
        click.get_current_context().exit(BUG)


def _run(out: Output, job: Job, files: dict[str, str]) -> Path:
    """The file that the ranks wrote."""
    from armillary.cli.launch.job_state import Ending, state_of
    from armillary.cluster.job import CHECK, note_handle, write_job
    from armillary.cluster.targets import TARGETS

    result = job.folder / CHECK
    _remove_results(job, result)
    write_job(job, files)
    job = note_handle(job, TARGETS[job.target].submit(job))
    try:
        with out.progress("checking", unit="s") as bar:
            is_over = Ending(job)
            while not is_over():
                time.sleep(POLL_S)
                bar.update(POLL_S)
        _find_printed(job, result)
        if not result.is_file():
            state = state_of(job)
            why = f" ({state.detail})" if state.detail else ""
            raise CheckFailed(f"the check {state.state}{why} without a result; see armillary launch logs {job.name}")
    except BaseException:
        with suppress(ArmillaryError):
            TARGETS[job.target].cancel(job)
        raise
    return result


def _remove_results(job: Job, result: Path) -> None:
    """What an earlier check of this name left."""
    from armillary.cluster.excluded_nodes import FILE

    for path in (result, job.folder / FILE, *job.logs.glob("*.log")):
        path.unlink(missing_ok=True)


def _ceilings(home: Home, probe: ClusterProbe, cluster: Cluster) -> dict[str, Peaks]:
    """What GPUs of the ranks' kinds reached here; ranks on CPUs share theirs."""
    from armillary.store.peaks import load_peaks

    if cluster.chip.kind == "cpu":
        return {}
    names = {rank.device for rank in probe.ranks}
    return {name: peaks for name in sorted(names) if (peaks := load_peaks(home, name)) is not None}


def _find_printed(job: Job, result: Path) -> None:
    """Write the result that the main rank printed, which may be on any node."""
    from armillary.cluster.log_files import log_lines
    from armillary.cluster.targets import TARGETS

    TARGETS[job.target].fetch_logs(job)
    for line in log_lines(job):
        if match := _PRINTED.fullmatch(line):
            result.write_text(match[1], encoding="utf-8")


def keep_links(home: Home, probe: ClusterProbe, cluster: Cluster) -> None:
    """Store the links of these nodes, for later plans of nodes with the same chip."""
    from armillary.store.peaks import BESIDE, NETWORK, new_peaks, save_peaks

    circumstances = {"date": time.strftime("%Y-%m-%d"), "nodes": len({rank.node for rank in probe.ranks})}
    points = [
        {"link": name, "chip": cluster.chip.name, "alpha_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
        for name, link in links_by_name(probe, cluster).items()
    ]
    if points:
        save_peaks(home, new_peaks(NETWORK).with_points("link", [{**point, BESIDE: circumstances} for point in points]))


def links_by_name(probe: ClusterProbe, cluster: Cluster) -> dict[str, LinkProbe]:
    """The measured links under the names that plans know them by; of several alike the slowest, which a step waits
    for. Links inside a node only where it has GPUs: those between ranks of a CPU are its memory."""
    from armillary.spec.network_domains import inner_link

    outer = [tier.link.name for tier in cluster.tiers if tier.link.kind == "scale_out"] or ["network"]
    inner = [tier.link.name for tier in cluster.tiers if tier.link.kind == "scale_up"]
    measured = [(outer[-1], probe.network)] if probe.network else []
    measured += [(inner_link(outer[-1], link.axis), link) for link in probe.domains]
    if inner and cluster.chip.kind != "cpu":
        measured += [(inner[0], group) for group in probe.groups if not group.between_nodes]
    slowest: dict[str, LinkProbe] = {}
    for name, link in sorted(measured, key=lambda each: each[1].bytes_per_s):
        slowest.setdefault(name, link)
    return slowest


def _say(out: Output, probe: ClusterProbe, verdict: Verdict, job: Job) -> None:
    from armillary.cluster.excluded_nodes import exclude_text

    out.table("", ["rank", "node", "GEMM", "memory", "disk"], [_row(each) for each in probe.ranks[:SHOWN_RANKS]])
    if len(probe.ranks) > SHOWN_RANKS:
        out.say(f"… and {len(probe.ranks) - SHOWN_RANKS} more ranks")
    for what, links in (("links", probe.links), ("groups", probe.groups)):
        for axis in dict.fromkeys(link.axis for link in links):
            rates = sorted(link.bytes_per_s for link in links if link.axis == axis)
            out.say(f"{axis}, {len(rates)} {what}: {bytes_text(rates[0])}/s to {bytes_text(rates[-1])}/s")
    if probe.network is not None:
        speed, latency = bytes_text(probe.network.bytes_per_s), seconds_text(probe.network.latency_s)
        out.say(f"between nodes: {speed}/s, {latency} per step of a ring")
    for kind in dict.fromkeys(link.axis for link in probe.domains):
        rates = sorted(link.bytes_per_s for link in probe.domains if link.axis == kind)
        out.say(f"between nodes of one {kind}: {bytes_text(rates[0])}/s to {bytes_text(rates[-1])}/s")
    for outlier in verdict.outliers:
        out.warn(outlier.text)
    if verdict.is_healthy:
        out.say(f"all {len(probe.ranks)} ranks and their links are alike ({probe.seconds:.0f} s)")
    elif verdict.excluded:
        out.say(exclude_text(job, verdict.excluded))


def _say_unknown(out: Output, devices: list[str], cluster: Cluster) -> None:
    """Devices that were compared with each other only."""
    if devices and cluster.chip.kind == "cpu":
        out.say("CPU ranks share their cores, so they were compared with each other only, not with a ceiling")
    elif devices:
        out.say(
            f"no ceiling is known for {', '.join(devices)}, so ranks were compared with each other only; "
            "armillary bench ceilings on one of them, with this --home, measures it"
        )


def _row(probe: RankProbe) -> list[object]:
    disk = f"{bytes_text(probe.disk_bytes_per_s)}/s" if probe.disk_bytes_per_s else None
    gemm, memory = f"{scaled(probe.gemm_flops)}FLOP/s", f"{bytes_text(probe.copy_bytes_per_s)}/s"
    return [probe.rank, probe.node, gemm, memory, disk]
