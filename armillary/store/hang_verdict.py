"""verdict.json in a run's folder: why the run stopped making progress, and where each of its ranks was."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from armillary.errors import ArmillaryError
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json

NAME = "verdict.json"
HangCause = Literal[
    "dead_process", "stopped_process", "desync", "slow_rank", "stuck_data_loader", "full_disk", "network"
]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that a rank has entered and not left."""

    kind: str
    group: str = ""
    sequence: int = 0  # in its process group; 0: not known
    bytes: int = 0
    line: str = ""  # where it was called
    members: tuple[int, ...] = ()  # ranks of its process group; none: all

    @property
    def text(self) -> str:
        number = f", number {self.sequence} of group {self.group or '0'}" if self.sequence else ""
        return f"{self.kind}{f' of {self.bytes:,} bytes' if self.bytes else ''}{number}"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank was."""

    rank: int
    host: str = ""
    pid: int = 0
    process: str = "unknown"  # running, sleeping, disk, stopped, gone, unknown
    step: int = -1
    phase: str = ""
    lines: tuple[str, ...] = ()  # of its main thread, innermost first
    collective: Collective | None = None
    silent_s: float = 0.0  # since its last heartbeat
    stalled_s: float = 0.0  # since it last made progress

    @property
    def text(self) -> str:
        """One line for a person."""
        where = self.lines[0] if self.lines else "no heartbeat yet"
        waits = f" in {self.collective.text}" if self.collective else ""
        step = f"step {self.step}, " if self.step >= 0 else ""
        return f"rank {self.rank}: {step}{self.phase or 'starting'}, process {self.process}{waits}, at {where}"


@dataclass(frozen=True, kw_only=True)
class HangVerdict:
    """Why a run stands still: the cause, the rank that causes it, and where all ranks are."""

    cause: HangCause
    rank: int
    text: str  # one line that ends with the next step
    collective: Collective | None = None  # in which the others wait
    stalled_s: float = 0.0
    ranks: tuple[RankPlace, ...] = ()
    time: float = 0.0  # unix seconds
    resolved: bool = False  # the run went on after all

    @property
    def lines(self) -> list[str]:
        """The verdict and one line per rank, those that differ from the others first where there are many."""
        return [self.text, *(f"  {place.text}" for place in self.ranks)]

    @property
    def goes_on(self) -> str:
        """What to say when it was none after all, or is over."""
        return f"the run goes on: {self.text.partition(';')[0]} no more"


def write_verdict(folder: Path, verdict: HangVerdict) -> None:
    write_json(folder / NAME, to_plain(verdict))


def resolve_verdict(folder: Path) -> None:
    """Note that the run goes on, where it has a verdict; best effort, as the disk may be full."""
    verdict = read_verdict(folder)
    if verdict is not None and not verdict.resolved:
        with suppress(ArmillaryError, OSError):
            write_verdict(folder, replace(verdict, resolved=True))


def read_verdict(folder: Path) -> HangVerdict | None:
    """The last verdict of a run; None where it never hung."""
    try:
        return build(HangVerdict, nan_safe_json.read_table(folder / NAME), NAME)
    except (ArmillaryError, OSError):
        return None
