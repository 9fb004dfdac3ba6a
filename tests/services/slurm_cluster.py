"""A Slurm of its own on this machine: munge, a controller and two node daemons, in one folder and on free ports."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "salloc")
CONFIG = """
ClusterName=armillary
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=60
MinJobAge=3600
SchedulerParameters=sched_interval=5,bf_interval=5
JobRequeue=1
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def running_slurm(folder: Path, switches: str = "") -> Iterator[dict[str, str]]:
    """Start it; yields the environment in which Slurm's programs find it. `switches` are the lines of topology.conf."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "state").mkdir()
    config = CONFIG.format(folder=folder, ports=_free_ports(3), user=getpass.getuser(), host=socket.gethostname())
    (folder / "slurm.conf").write_text(f"{config}TopologyPlugin=topology/tree\n" if switches else config)
    (folder / "topology.conf").write_text(switches)
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack:
        stack.enter_context(_munge(folder))
        stack.enter_context(_daemon(["slurmctld", "-D"], env))
        for node in ("node1", "node2"):
            (folder / f"spool-{node}").mkdir()
            stack.enter_context(_daemon(["slurmd", "-D", "-N", node], env))
        _wait_idle(env, folder)
        stack.callback(_end_jobs, env)
        yield env


def _end_jobs(env: dict[str, str]) -> None:
    """What a failed test left running would outlive the daemons."""
    subprocess.run(["scancel", "--state=PENDING"], env=env, check=False)
    subprocess.run(["scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}"], env=env, check=False)
    end = time.monotonic() + 30
    while subprocess.run(["squeue", "-h"], env=env, capture_output=True, check=False).stdout and time.monotonic() < end:
        time.sleep(0.3)


@contextmanager
def _munge(folder: Path) -> Iterator[None]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    options = [f"--{name}={folder / file}" for name, file in (names | {"log-file": "munge.log"}).items()]
    with _daemon(["munged", "--foreground", "--force", *options], dict(os.environ)):
        end = time.monotonic() + 30
        while not (folder / "munge.socket").exists():
            assert time.monotonic() < end, (folder / "munge.log").read_text()
            time.sleep(0.05)
        yield


@contextmanager
def _daemon(command: list[str], env: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_idle(env: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + 90
    while True:
        said = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=env, capture_output=True, text=True, check=False)
        if said.stdout.split() == ["idle", "2"]:
            return
        assert time.monotonic() < end, said.stdout + said.stderr + (folder / "slurmctld.log").read_text()[-3000:]
        time.sleep(0.3)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
