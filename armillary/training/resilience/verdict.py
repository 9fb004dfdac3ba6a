"""The verdict on a run that stands still: a pure function of heartbeats and of what the system knows of the processes.

A process that is gone or stopped is a verdict at once. Otherwise every rank must have stood still for its limit; the
cause is then read from where each of them is. Limits are short where nobody computes, because then nobody can get on,
and long where a rank computes or reads files, because a busy machine makes any step slow.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import SIGABRT

from armillary.store.hang_verdict import Collective, HangCause, HangVerdict, RankPlace
from armillary.training.resilience.process_facts import ProcessState
from armillary.training.resilience.rank_heartbeat import Heartbeat

IDLE_SHARE = 0.2
"""seconds per second below which a rank waits; one that waits in gloo uses about 0.01, one that computes about 1
(2026-11, 2 cores of an Intel Xeon)"""
STOPPED_S = 8.0
"""a stopped process may be continued at once, as a batch system does"""
SILENT_S = 15.0
"""without a heartbeat before a rank of another machine counts as lost"""
IDLE_S, IDLE_OUTSIDE_S = 10.0, 22.0
"""for ranks that wait in a collective inside a step, and for others that do not compute"""
LOADER_S, REMOTE_LOADER_S = 18.0, 120.0
"""for a batch, from files of this machine and from a store"""
BUSY_S, BUSY_STEPS = 20.0, 10.0
"""a rank that computes: so many seconds, and so many times a usual step"""
OUTSIDE_S, BUSY_OUTSIDE_S = 120.0, 600.0
"""outside of steps, for a rank that waits for something else than ranks, and for one that computes"""
FULL_BYTES = 16 * 1024 * 1024
"""free space below which a disk is full"""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a watcher knows of one rank."""

    rank: int
    beat: Heartbeat | None  # its last heartbeat
    silent_s: float = 0.0  # since that
    stalled_s: float = 0.0  # since it last made progress
    cpu_share: float = 0.0  # seconds per second meanwhile in which its threads ran or waited for a core
    process: ProcessState = "unknown"
    exit_code: int | None = None
    crash_lines: tuple[str, ...] = ()  # where it was when C++ code aborted it

    @property
    def is_idle(self) -> bool:
        """Whether it waits; a host that waits for its GPU may spin or sleep, so nothing is known of those."""
        on_gpu = self.beat is not None and self.beat.on_gpu
        return not on_gpu and not _is_writing(self) and self.process != "disk" and self.cpu_share < IDLE_SHARE

    @property
    def waits_in(self) -> Collective | None:
        return self.beat.collective if self.beat is not None else None

    @property
    def line(self) -> str:
        if self.crash_lines:
            return self.crash_lines[0]
        return self.beat.lines[0] if self.beat is not None and self.beat.lines else "an unknown line"


def find_verdict(facts: Sequence[RankFacts], *, remote_data: bool = False) -> HangVerdict | None:
    """Why the run stands still; None where it does not, or not for long enough."""
    live = [each for each in facts if not (each.beat is not None and each.beat.ended)]
    for cause, rank, text in (_aborted(facts), _gone(live), _stopped(live), _standing(facts, live, remote_data)):
        if text:
            return _verdict(cause, rank, text, facts)
    return None


_Found = tuple[HangCause, int, str]
_NOTHING: _Found = ("network", -1, "")


def _aborted(facts: Sequence[RankFacts]) -> _Found:
    """gloo aborts a process whose peer sends more than it expects: one of them has left a collective out. The other
    ranks then fail, and their last heartbeats say where they were."""
    aborted = [each for each in facts if each.exit_code == -SIGABRT and each.crash_lines]
    failed = [each for each in facts if each.beat is not None and each.beat.failed and each.beat.collective is not None]
    if not aborted or not failed:
        return _NOTHING
    gone, other = aborted[0], failed[0]
    assert other.waits_in is not None
    here, there = _fetches(gone.crash_lines), other.waits_in.line.startswith(_FETCH)
    odd, waiting = (gone, other) if here and not there else (other, gone)
    where = {id(gone): gone.line, id(other): _where(other)}
    text = f"rank {odd.rank} was at {where[id(odd)]} while rank {waiting.rank} waited for it at {where[id(waiting)]}"
    return "desync", odd.rank, f"{text}, and gloo aborted rank {gone.rank}; all ranks must call the same collectives"


_FETCH = "armillary/parallel/consensus.py"
"""the all-reduce before each step: a rank in it is further on than one inside the step before"""


def _fetches(lines: Sequence[str]) -> bool:
    return any(line.startswith(_FETCH) for line in lines)


def _gone(live: Sequence[RankFacts]) -> _Found:
    for each in sorted(live, key=lambda each: -each.silent_s):  # the first to go takes others with it
        if each.process == "gone":
            return "dead_process", each.rank, f"rank {each.rank} is dead: {_how(each.exit_code)}; {_last(each)}"
        if each.process == "unknown" and each.beat is not None and each.silent_s >= SILENT_S:
            silent = f"no heartbeat for {each.silent_s:.0f} s from {each.beat.host}"
            return "dead_process", each.rank, f"rank {each.rank} is lost: {silent}; look at that machine, {_last(each)}"
    return _NOTHING


def _how(code: int | None) -> str:
    if code is None:
        return "its process has ended without a word"
    memory = " (the system kills what needs too much memory)" if code == -9 else ""
    return (
        f"its process was killed by signal {-code}{memory}" if code < 0 else f"its process ended with exit code {code}"
    )


def _last(fact: RankFacts) -> str:
    return f"it was last seen at {fact.line}" if fact.beat is not None else "it had sent no heartbeat yet"


def _stopped(live: Sequence[RankFacts]) -> _Found:
    for each in live:
        if each.process == "stopped" and each.silent_s >= STOPPED_S:
            pid = each.beat.pid if each.beat is not None else 0
            wake = f"continue it with kill -CONT {pid}, or start again" if pid else "continue it, or start again"
            return "stopped_process", each.rank, f"rank {each.rank} is stopped (SIGSTOP); {_last(each)}; {wake}"
    return _NOTHING


def _standing(facts: Sequence[RankFacts], live: Sequence[RankFacts], remote_data: bool) -> _Found:
    """Ranks at a store barrier wait for the others' work, however long that takes: these are judged without them."""
    standing = [each for each in live if not (each.beat is not None and each.beat.in_barrier)]
    if not standing or any(each.stalled_s < limit_s(each, remote_data) for each in standing):
        return _NOTHING
    for result in (_full_disk(standing), _loader(standing), _slow(standing, alone=len(live) == 1)):
        if result[2]:
            return result
    return _desync(facts, live)


def limit_s(fact: RankFacts, remote_data: bool = False) -> float:
    """How long a rank may stand still where it is."""
    beat = fact.beat
    if beat is None:
        return BUSY_OUTSIDE_S
    if beat.in_loader:
        return max(REMOTE_LOADER_S if remote_data else LOADER_S, 5 * beat.step_s)
    if fact.is_idle and beat.is_steady:
        return IDLE_S if beat.collective is not None else IDLE_OUTSIDE_S
    if fact.is_idle:
        return IDLE_OUTSIDE_S if beat.collective is not None else OUTSIDE_S
    return max(BUSY_S, BUSY_STEPS * beat.step_s) if beat.is_steady else BUSY_OUTSIDE_S


def _full_disk(live: Sequence[RankFacts]) -> _Found:
    for each in live:
        if each.beat is not None and 0 <= each.beat.free_bytes < FULL_BYTES and each.waits_in is None:
            free = f"{each.beat.free_bytes:,} bytes are free"
            return (
                "full_disk",
                each.rank,
                f"the disk of rank {each.rank} is full ({free}), at {each.line}; free some space",
            )
    return _NOTHING


def _loader(live: Sequence[RankFacts]) -> _Found:
    for each in live:
        if each.beat is not None and each.beat.in_loader:
            where = f", whose thread is at {each.beat.loader_line}" if each.beat.loader_line else ""
            text = f"the data loader of rank {each.rank} has returned nothing for {each.stalled_s:.0f} s{where}"
            return "stuck_data_loader", each.rank, f"{text}; check the disk or store with the shards"
    return _NOTHING


def _slow(standing: Sequence[RankFacts], *, alone: bool) -> _Found:
    """One that is in no collective; the busiest where several are not, or one that waits for its disk."""
    outside = [each for each in standing if each.waits_in is None]
    if not outside or (alone and not outside[0].is_idle):  # nobody waits for one that is alone and computes
        return _NOTHING
    slow = max(outside, key=lambda each: (_is_writing(each), each.cpu_share, -each.rank))
    wait = "" if alone else ", and the others wait for it"
    text = f"rank {slow.rank} {_does(slow)} at {slow.line} for {slow.stalled_s:.0f} s{wait}"
    return "slow_rank", slow.rank, f"{text}; look at that line or at its machine"


def _does(fact: RankFacts) -> str:
    if fact.is_idle:
        return "waits for something else than ranks"
    return "waits for the disk" if _is_writing(fact) else "computes"


def _is_writing(fact: RankFacts) -> bool:
    return fact.beat is not None and fact.beat.is_writing


def _desync(facts: Sequence[RankFacts], live: Sequence[RankFacts]) -> _Found:
    """All wait in collectives: in different ones, or one has ended without the others, or in the same."""
    if any(each.waits_in is None for each in live):
        return _NOTHING
    ended = [each.rank for each in facts if each.beat is not None and each.beat.ended]
    if ended:
        rest = _first(live)
        text = f"rank {ended[0]} has ended while the others wait in {rest.text if rest else 'a collective'}"
        return "desync", ended[0], f"{text}; all ranks must take the same steps"
    awaited = {each.rank: sum(_waits_for(other, each) for other in live) for each in live}
    if not any(awaited.values()):
        shared = _first(live)
        text = f"all ranks wait in {shared.text if shared else 'the same collective'}, which does not end"
        return "network", live[0].rank, f"{text}; look at the network between them"
    odd = max(_cycle(live, awaited), key=lambda each: (_marks(each), awaited[each.rank], each.rank))
    waiting = next(each for each in live if _waits_for(each, odd))
    text = f"rank {odd.rank} is in {_where(odd)} while others wait for it in {_where(waiting)}"
    return "desync", odd.rank, f"{text}; all ranks must call the same collectives in the same order"


def _waits_for(waiter: RankFacts, other: RankFacts) -> bool:
    """Whether `waiter` is in a collective that `other` should be in, and is not."""
    own, theirs = waiter.waits_in, other.waits_in
    assert own is not None and theirs is not None
    return (not own.members or other.rank in own.members) and _key(own) != _key(theirs)


def _cycle(live: Sequence[RankFacts], awaited: Mapping[int, int]) -> list[RankFacts]:
    """Ranks that wait for each other in a ring, found from the one that most wait for."""
    path = [max(live, key=lambda each: awaited[each.rank])]
    while (following := next((each for each in live if _waits_for(path[-1], each)), None)) is not None:
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return path[-1:]


def _marks(fact: RankFacts) -> tuple[int, int]:
    """Of ranks that wait for each other, the one that left a collective out is further on in the program, or has
    counted fewer."""
    assert fact.waits_in is not None and fact.beat is not None
    return fact.beat.marks, -fact.waits_in.sequence


def _where(fact: RankFacts) -> str:
    assert fact.waits_in is not None
    return f"{fact.waits_in.text} at {fact.waits_in.line or fact.line}"


def _key(collective: Collective | None) -> tuple[str, str, int, int]:
    assert collective is not None
    return collective.group, collective.kind, collective.sequence, collective.bytes


def _first(live: Sequence[RankFacts]) -> Collective | None:
    return next((each.waits_in for each in live if each.waits_in is not None), None)


def _verdict(cause: HangCause, rank: int, text: str, facts: Sequence[RankFacts]) -> HangVerdict:
    rest = [each for each in facts if each.rank != rank and each.waits_in is not None]
    return HangVerdict(
        cause=cause,
        rank=rank,
        text=text,
        collective=_first(rest) or _first(facts),
        stalled_s=max((each.stalled_s for each in facts if each.rank == rank), default=0.0),
        ranks=tuple(place_of(each) for each in facts),
        time=time.time(),
    )


def place_of(fact: RankFacts) -> RankPlace:
    beat = fact.beat
    if beat is None:
        return RankPlace(rank=fact.rank, process=fact.process)
    return RankPlace(
        rank=fact.rank,
        host=beat.host,
        pid=beat.pid,
        process=fact.process,
        step=beat.step,
        phase="ended" if beat.ended else beat.phase,
        lines=fact.crash_lines or beat.lines,
        collective=beat.collective,
        silent_s=fact.silent_s,
        stalled_s=fact.stalled_s,
    )
