"""A job: one recipe's training on some nodes, as every target submits it, and its folder jobs/NAME.

job.json           this record
recipe.toml        the recipe with all overrides applied
logs/node-K.log    what node K printed; Slurm's own output is in logs/slurm.log
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from zlib import crc32

from armillary.errors import ArmillaryError, BadInput, unknown
from armillary.spec.tables.launch_target import Launch, TargetName
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json
from armillary.store.home import Home

FILE, RECIPE, CHECK = "job.json", "recipe.toml", "check.json"
_FIRST_PORT, _NUM_PORTS = 20_000, 9_000
"""below the ports that Linux gives to outgoing connections (32768 and above)"""

State = Literal["pending", "running", "finished", "stopped", "failed", "cancelled", "unknown"]
INTERRUPTED = 75
"""exit code of a node whose ranks were asked to save and end, and did: EX_TEMPFAIL, so that schedulers start the job
again; such a job is stopped, and resumes when it is launched again"""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What a target says of a job: `where` are its nodes, `detail` the target's own words."""

    state: State
    detail: str = ""
    where: str = ""

    @property
    def is_live(self) -> bool:
        return self.state in ("pending", "running")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is started, on how many nodes, and how."""

    name: str  # also the name of the run
    target: TargetName
    folder: Path  # jobs/NAME
    work: Path  # folder in which ranks start
    home: Path | None = None  # --home of the ranks; None: the default
    num_nodes: int
    least_nodes: int = 0  # with which an elastic run goes on; 0: with all of them only
    ranks_per_node: int
    gpus_per_node: int = 0
    restarts: int = 0  # of ranks, by torchrun
    grace_s: float = 0.0  # train.grace_s
    python: str
    launch: Launch = field(default_factory=Launch)
    created: float = field(default_factory=time.time)
    is_check: bool = False  # measures the nodes instead of training on them
    handle: str = ""  # the target's id of the job, once it is submitted

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def port(self) -> int:
        """Where ranks meet on the first node: given, or derived from the name."""
        return self.launch.port or _FIRST_PORT + crc32(self.name.encode()) % _NUM_PORTS

    @property
    def stop_s(self) -> float:
        """Seconds that ranks may take to save and end when they are asked to."""
        return max(self.launch.signal_s, self.grace_s)

    def rank_command(self) -> tuple[str, ...]:
        """What every rank runs, as arguments of `python -m armillary`."""
        home = ("--home", str(self.home)) if self.home else ()
        if self.is_check:
            return ("launch", "measure", str(self.folder / RECIPE), str(self.folder / CHECK), *home)
        return (
            "train",
            str(self.folder / RECIPE),
            "--run",
            self.name,
            "--devices",
            str(self.ranks_per_node if self.least_nodes else self.num_ranks),
            "--yes",
            *home,
        )

    def node_command(self, rendezvous: str, *, node_rank: str = "", node_id: str = "") -> str:
        """The shell command that starts the ranks of one node; `rendezvous` and the others may be shell variables."""
        options = {
            "--nodes": str(self.num_nodes),
            "--least": str(self.least_nodes) if self.least_nodes and not self.is_check else "",
            "--ranks": str(self.ranks_per_node),
            "--id": shlex.quote(self.name),
            "--restarts": str(self.restarts),
            "--stop-s": f"{self.stop_s:g}",
            "--rendezvous": rendezvous,
            "--node-rank": node_rank,
            "--node-id": node_id,
            "--interface": shlex.quote(self.launch.interface) if self.launch.interface else "",
        }
        given = [f"{name} {value}" for name, value in options.items() if value]
        program = f"{shlex.quote(self.python)} -m armillary.cluster.node"
        return " ".join((program, *given, "--", shlex.join(self.rank_command())))


# --- jobs/NAME


def jobs_folder(home: Home) -> Path:
    return home.work / "jobs"


def write_job(job: Job, files: dict[str, str]) -> None:
    """Write a job's record and the files its target needs."""
    job.logs.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (job.folder / name).write_text(text, encoding="utf-8")
    _write(job)


def note_handle(job: Job, handle: str) -> Job:
    """The job with the target's id, written down."""
    job = replace(job, handle=handle)
    _write(job)
    return job


def _write(job: Job) -> None:
    values = to_plain(job) | {key: str(value) for key in ("folder", "work", "home") if (value := getattr(job, key))}
    write_json(job.folder / FILE, values)


def read_job(folder: Path) -> Job:
    values = nan_safe_json.read_table(folder / FILE)
    paths = {key: Path(values.pop(key)) for key in ("folder", "work", "home") if values.get(key)}
    table = values.pop("launch", {})
    try:
        return Job(**{**values, **paths, "launch": build(Launch, table, "launch")})
    except TypeError as error:
        raise BadInput(f"{folder / FILE} is of another version ({error}); remove {folder}") from None


def list_jobs(home: Home) -> Iterator[Job]:
    """Newest first; folders without a readable job.json are left out."""
    readable = []
    for path in jobs_folder(home).glob(f"*/{FILE}"):
        try:
            readable.append(read_job(path.parent))
        except (ArmillaryError, OSError):
            continue
    yield from sorted(readable, key=lambda job: job.created, reverse=True)


def find_job(home: Home, name: str) -> Job:
    """By name, or by the target's id."""
    jobs = list(list_jobs(home))
    for job in jobs:
        if name in (job.name, job.handle):
            return job
    if not jobs:
        raise BadInput(f"no job '{name}': none was started from here; armillary launch RECIPE starts one")
    raise unknown("job", name, [job.name for job in jobs], where="armillary launch jobs lists them")
