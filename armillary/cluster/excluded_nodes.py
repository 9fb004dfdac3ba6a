"""Nodes that a check named as outliers, as excluded.json in its folder, and how a target leaves them out of a job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from armillary.cluster.job import Job, jobs_folder
from armillary.spec.tables.launch_target import Launch, TargetName
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json
from armillary.store.home import Home

FILE, CHECK_NAME = "excluded.json", "check-{}"
_EXCLUDE = re.compile(r"(?:--exclude|-x)[ =]?(\S+)")


def without_nodes(launch: Launch, target: TargetName, nodes: Sequence[str]) -> Launch | None:
    """The [launch] table that leaves these nodes out; None where the target has no way to."""
    if target == "slurm":
        return replace(launch, options=_excluding(launch.options, nodes))
    if target == "ssh":
        return replace(launch, hosts=tuple(host for host in launch.hosts if host not in nodes))
    return None


def _excluding(options: Sequence[str], nodes: Sequence[str]) -> tuple[str, ...]:
    """sbatch's options with one --exclude: of several it takes the last."""
    before = [match[1] for option in options if (match := _EXCLUDE.fullmatch(option.strip()))]
    remaining = (option for option in options if not _EXCLUDE.fullmatch(option.strip()))
    return (*remaining, f"--exclude={','.join((*before, *nodes))}")


def exclude_text(job: Job, nodes: Sequence[str]) -> str:
    """How jobs are started without these nodes, to copy; `job` is their check."""
    launch, names = without_nodes(job.launch, job.target, nodes), ", ".join(nodes)
    if job.target == "kubernetes":
        return f"leave them out with kubectl cordon {' '.join(nodes)}"
    if launch is None:
        return f"--on {job.target} has no way to leave a node out; repair {names}, or take it away from there"
    key, items = ("options", launch.options) if job.target == "slurm" else ("hosts", launch.hosts)
    setting = shlex.quote(f"launch.{key}=[{', '.join(map(_quoted, items))}]")
    fewer = job.target == "ssh" and len(items) < job.num_nodes
    more = f", and more hosts or --nodes {len(items)}" if fewer and items else ""
    own = job.name.removeprefix(CHECK_NAME.format(""))
    return f"launch with --run {own} leaves out {names}; other jobs do with --set {setting}{more}"


def _quoted(item: str) -> str:
    return f"'{item}'" if '"' in item else f'"{item}"'


def note_excluded(job: Job, nodes: Sequence[str]) -> None:
    """Keep what a check named, for the job of the same name."""
    write_json(job.folder / FILE, {"target": job.target, "nodes": list(nodes)})


def excluded_nodes(home: Home, name: str, target: TargetName) -> tuple[str, ...]:
    """What the newest check of a job's name on this target named."""
    file = jobs_folder(home) / CHECK_NAME.format(name) / FILE
    noted = nan_safe_json.read_table(file) if file.is_file() else {}
    return tuple(noted["nodes"]) if noted.get("target") == target else ()
