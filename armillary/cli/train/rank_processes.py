"""The processes of this machine's ranks, started by torchrun's own code: what they are told, and how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

POLL_S = 0.1
SURVIVORS_S = 5.0
"""for ranks to end by themselves after another was killed: their collectives fail at once with gloo, and never with
a device that waits"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the ranks of this machine stand among all ranks of the run, and where these meet."""

    count: int  # ranks of this machine
    first: int = 0  # the lowest of them
    world: int  # all ranks
    host: str  # of the store in which they meet
    port: int
    store: Any = None  # it, where it is in this process
    on_loopback: bool = True  # all ranks are on one machine

    @classmethod
    def alone(cls, count: int) -> Place:
        """All ranks are here."""
        store = new_store("127.0.0.1")
        return cls(count=count, world=count, host=store.host, port=store.port, store=store)

    def environment(self, threads: int | None) -> dict[str, str]:
        """What torchrun sets for every rank; `threads` are those of a rank that computes on the CPU."""
        common = {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "armillary",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCH_FR_BUFFER_SIZE": "256",  # torch records the last collectives, for the verdict on a hang
        }
        if threads is None:
            return common
        common["OMP_NUM_THREADS"] = str(threads)
        return common | ({"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"} if self.on_loopback else {})


def new_store(host: str) -> Any:
    """A store of this process, for one start of ranks: torch uses the same keys at each start."""
    from torch.distributed import TCPStore

    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


class RankProcesses:
    """`python -m PROGRAM TASK` once for each rank of a place; ranks have their number among all ranks of the run."""

    def __init__(self, program: str, task: str, place: Place, threads: int | None, folder: str) -> None:
        """Logs of torch go to `folder`."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # we say it
        self.place, common = place, place.environment(threads)
        before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGQUIT)}
        try:
            self._processes: Any = start_processes(
                name="rank",
                entrypoint=sys.executable,
                args={n: ("-m", program, task) for n in range(place.count)},
                envs={n: {**common, "RANK": str(place.first + n), "LOCAL_RANK": str(n)} for n in range(place.count)},
                logs_specs=DefaultLogsSpecs(folder),
            )
        finally:
            for number, handler in before.items():  # torch takes the signals; they are forwarded by `launch`
                signal.signal(number, handler)

    @property
    def pids(self) -> dict[int, int]:
        return {self.place.first + n: pid for n, pid in self._processes.pids().items()}

    def codes(self) -> dict[int, int | None]:
        """Rank -> exit code; None where it runs."""
        handlers = self._processes.subprocess_handlers
        return {self.place.first + n: handler.proc.poll() for n, handler in handlers.items()}

    def killed(self) -> dict[int, int]:
        """Rank -> exit code of those that a signal ended."""
        return {rank: code for rank, code in self.codes().items() if code is not None and code < 0}

    def has_ended(self) -> bool:
        """Whether a rank has failed or all have ended."""
        codes = self.codes().values()
        return any(codes) or all(code is not None for code in codes)

    def signal(self, number: int) -> None:
        for pid in self.pids.values():
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(pid, number)

    def kill(self) -> None:
        """End all of them now: a rank in a collective reacts to nothing else."""
        self._processes.close(death_sig=signal.SIGKILL, timeout=10)

    def end_survivors(self) -> None:
        """Ranks fail by themselves where another is gone; those that do not are killed after a while."""
        end = time.monotonic() + SURVIVORS_S
        while None in self.codes().values() and time.monotonic() < end:
            time.sleep(POLL_S)
        self.kill()

    def failures(self) -> dict[int, int]:
        """Rank -> exit code of those that failed by themselves, once one has or all have ended; the others are ended.
        A rank that torch's store tells of its end keeps its own code."""
        first = {rank: code for rank, code in self.codes().items() if code}
        if not first:
            self._processes.wait(timeout=POLL_S, period=POLL_S)  # torch closes its pipes
            return {}
        self._processes.close(death_sig=signal.SIGTERM, timeout=10)
        codes = first | {rank: code or 0 for rank, code in self.codes().items()}
        return {rank: code for rank, code in codes.items() if code not in (0, -signal.SIGTERM)} or first
