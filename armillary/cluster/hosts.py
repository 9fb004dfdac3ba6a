"""Jobs without a scheduler: a script per node that runs in the background, and files that say how it ended.

pid-K     process of node K's script, which leads a process group of its own
exit-K    its exit code, once it has ended
cancelled exists once the job was cancelled
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Mapping

from armillary.cluster.job import INTERRUPTED, Job, JobState
from armillary.cluster.node import is_interrupted

Shell = Callable[[int, str], str]
"""runs a line of shell on node K"""
_TOLD_TO_END = {0, INTERRUPTED, 128 + signal.SIGTERM}


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
        job.node_command(rendezvous, node_rank=str(node), node_id=node_id),
        f"code=$?; echo $code > {folder}/exit-{node}; exit $code",
    ]
    return "\n".join(lines) + "\n"


def start(job: Job, shell: Shell) -> str:
    """Start every node's script in the background."""
    for path in (path for name in ("pid-*", "exit-*", "cancelled") for path in job.folder.glob(name)):
        path.unlink()
    for node in range(job.num_nodes):
        script, log = (shlex.quote(str(path)) for path in (job.folder / script_name(node), _log(job, node)))
        shell(node, f"setsid nohup bash {script} >> {log} 2>&1 < /dev/null &")
    return job.name


def script_name(node: int) -> str:
    return f"node-{node}.sh"


def state(job: Job, shell: Shell) -> JobState:
    """From the exit codes of its nodes, and of those that have none, whether their process lives. An elastic job goes
    on without nodes that are lost, and is finished where one of them says so."""
    live = {node for node in range(job.num_nodes) if _exit_code(job, node) is None and _is_alive(job, node, shell)}
    codes = [_exit_code(job, node) for node in range(job.num_nodes)]  # a script may have ended meanwhile
    lost = [f"node {node} was killed" for node, code in enumerate(codes) if code is None and node not in live]
    wrong = [*lost, *(f"node {node} ended with {code}" for node, code in enumerate(codes) if code)]
    if live and None in codes and (not lost or job.least_nodes):
        return JobState(state="running", detail=", ".join(wrong))
    if (job.folder / "cancelled").exists():
        return JobState(state="cancelled")
    if not wrong or (job.least_nodes and 0 in codes):
        return JobState(state="finished")
    if not lost and (
        set(codes) <= {0, INTERRUPTED} or (set(codes) <= _TOLD_TO_END and is_interrupted(job.rank_command()))
    ):
        return JobState(state="stopped", detail="resumable")
    return JobState(state="failed", detail=", ".join(wrong))


def cancel(job: Job, shell: Shell) -> None:
    """Ask the ranks of every node to save and end."""
    (job.folder / "cancelled").touch()
    for node in range(job.num_nodes):
        if _exit_code(job, node) is None:
            shell(node, f"kill -TERM -- -{_pid(job, node)} 2>/dev/null || true")


def _exit_code(job: Job, node: int) -> int | None:
    try:
        return int((job.folder / f"exit-{node}").read_text())
    except (OSError, ValueError):  # not yet there, or not yet written
        return None


def _pid(job: Job, node: int) -> int:
    """Of the node's script; 0, which is no process group of it, before it has started."""
    try:
        return int((job.folder / f"pid-{node}").read_text())
    except (OSError, ValueError):
        return 0


def _is_alive(job: Job, node: int, shell: Shell) -> bool:
    """Whether the process is there and is this job's: a number may be another's by now."""
    pid = _pid(job, node)
    if not pid:
        return True  # it is about to start
    script = shlex.quote(str(job.folder / script_name(node)))
    line = f"grep -qF {script} /proc/{pid}/cmdline 2>/dev/null && echo alive || true"
    return "alive" in shell(node, line)


def _log(job: Job, node: int) -> str:
    return str(job.logs / f"node-{node}.log")
