"""Jobs without a scheduler: a script per node that runs in the background, and files that say how it ended.

pid-K     process of node K's script, which leads a process group of its own
exit-K    its exit code, once it has ended
cancelled exists once the job was cancelled
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from armillary.cluster.commands import TargetFailed
from armillary.cluster.job import INTERRUPTED, Job, JobState
from armillary.cluster.node import is_interrupted
from armillary.errors import ArmillaryError

Shell = Callable[[int, str], str]
"""runs a line of shell on node K"""
_TERMINATED = 128 + signal.SIGTERM
_TOLD_TO_END = {0, INTERRUPTED, _TERMINATED}
_START_S, _START_PER_NODE_S = 60.0, 2.0
"""after so long a node whose script has not begun to run will not: nodes are started one after the other"""


def node_script(
    job: Job, node: int, rendezvous: str, *, node_id: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """The script of one node. It waits for the ranks when it is told to end: they are told, too, and save."""
    variables = {**(environment or {}), **job.launch.environment}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    folder = shlex.quote(str(job.folder))
    lines = [
        "#!/bin/bash",
        f"# node {node} of job {job.name}; started by armillary launch",
        f"echo $$ > {folder}/pid-{node}",
        "trap : TERM INT HUP",
        f"cd {shlex.quote(str(job.work))} || exit 2",
        *exports,
        *job.launch.setup,
        f"[ -e {folder}/cancelled ] && {{ echo {_TERMINATED} > {folder}/exit-{node}; exit {_TERMINATED}; }}",
        job.node_command(rendezvous, node_rank=str(node), node_id=node_id),
        f"code=$?; echo $code > {folder}/exit-{node}; exit $code",
    ]
    return "\n".join(lines) + "\n"


def start(job: Job, shell: Shell) -> str:
    """Start every node's script in the background; all or none of them."""
    for path in (path for name in ("pid-*", "exit-*", "cancelled") for path in job.folder.glob(name)):
        path.unlink()
    try:
        for node in range(job.num_nodes):
            script, log = (shlex.quote(str(path)) for path in (job.folder / script_name(node), _log(job, node)))
            shell(node, f"setsid nohup bash {script} >> {log} 2>&1 < /dev/null &")
    except BaseException:
        with suppress(ArmillaryError):
            cancel(job, shell)
        raise
    return job.name


def script_name(node: int) -> str:
    return f"node-{node}.sh"


def state(job: Job, shell: Shell) -> JobState:
    """From the exit codes of its nodes, and of those that have none, whether their process lives. A job runs while one
    of its nodes does. An elastic job goes on without nodes that are lost, and is finished where one of them says so."""
    lost = _lost_nodes(job, shell)
    codes = [_exit_code(job, node) for node in range(job.num_nodes)]  # a script may have ended meanwhile
    lost = {node: why for node, why in lost.items() if codes[node] is None}
    ended = (f"node {node} ended with {code}" for node, code in enumerate(codes) if code)
    wrong = [*(f"node {node} {why}" for node, why in lost.items()), *ended]
    if codes.count(None) > len(lost):
        return JobState(state="running", detail=", ".join(wrong))
    if (job.folder / "cancelled").exists():
        return JobState(state="cancelled")
    if not wrong or (job.least_nodes and 0 in codes):
        return JobState(state="finished")
    if not lost and _is_stopped(job, codes):
        return JobState(state="stopped", detail="resumable")
    return JobState(state="failed", detail=", ".join(wrong))


def _is_stopped(job: Job, codes: Sequence[int | None]) -> bool:
    """Whether all nodes ended because they were told to."""
    ends = set(codes)
    return ends <= {0, INTERRUPTED} or (ends <= _TOLD_TO_END and is_interrupted(job.rank_command()))


def _lost_nodes(job: Job, shell: Shell) -> dict[int, str]:
    """Nodes that have not ended and do not live, and why; an error where nothing is known of any node."""
    lost: dict[int, str] = {}
    silent: list[TargetFailed] = []
    for node in range(job.num_nodes):
        if _exit_code(job, node) is not None:
            continue
        try:
            if not _is_alive(job, node, shell):
                lost[node] = "was killed" if _pid(job, node) else "has not started"
        except TargetFailed as error:
            lost[node] = "does not answer"
            silent.append(error)
    if len(silent) == job.num_nodes:
        raise silent[0]
    return lost


def cancel(job: Job, shell: Shell) -> None:
    """Ask the ranks of every node to save and end; a script that has not begun sees the file `cancelled`. A node that
    cannot be asked does not keep the others from it."""
    (job.folder / "cancelled").touch()
    errors = []
    for node in range(job.num_nodes):
        pid = _pid(job, node)
        if not pid or _exit_code(job, node) is not None:
            continue
        try:
            shell(node, f"kill -TERM -- -{pid} 2>/dev/null || true")
        except ArmillaryError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _exit_code(job: Job, node: int) -> int | None:
    try:
        return int((job.folder / f"exit-{node}").read_text())
    except (OSError, ValueError):  # not yet there, or not yet written
        return None


def _pid(job: Job, node: int) -> int:
    """Of the node's script; 0 before it has started."""
    try:
        return int((job.folder / f"pid-{node}").read_text())
    except (OSError, ValueError):
        return 0


def _is_alive(job: Job, node: int, shell: Shell) -> bool:
    """Whether the process is there and is this job's: a number may be another's by now."""
    pid = _pid(job, node)
    if not pid:  # it is about to start
        return time.time() < job.created + _START_S + _START_PER_NODE_S * job.num_nodes
    script = shlex.quote(str(job.folder / script_name(node)))
    line = f"grep -qF {script} /proc/{pid}/cmdline 2>/dev/null && echo alive || true"
    return "alive" in shell(node, line)


def _log(job: Job, node: int) -> str:
    return str(job.logs / f"node-{node}.log")
