"""The process of an engine that computes nothing: scheduler, KV cache, thread and messages are those that serve, and
every step sleeps for its predicted time. It is the simulator's device on a real clock (serve.emulate).

`python -m armillary.planning.simulation.sleeping_engine FD`
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from armillary.engine.engine import Engine
from armillary.engine.output.output_text import NoText, OutputProcessor
from armillary.engine.output.structured import Structures
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.step_loop import Loop
from armillary.planning.simulation.simulated_device import Launched, SimulatedDevice
from armillary.planning.simulation.simulated_engine import System
from armillary.planning.simulation.step_cost import StepCost
from armillary.serving.processes.engine_ipc import EngineConfig, EngineReady, SendQueue
from armillary.serving.processes.engine_main import RequestReceiver, main, start

TOKEN = 40
"""every output token: a letter in byte-level vocabularies, which is streamed at once; a request ends at max_tokens"""


@dataclass(frozen=True, kw_only=True)
class SleepingConfig(EngineConfig):
    """First message to such a process."""

    program: str = "armillary.planning.simulation.sleeping_engine"
    system: System
    cost: StepCost
    start_s: float = 0.0
    """time that a start takes at least"""


class SleepingDevice(SimulatedDevice):
    """The simulated device on the real clock."""

    def clock(self) -> float:
        return time.monotonic()

    def launch(self, decision: Decision) -> Launched:
        self.now = time.monotonic()
        launched = super().launch(decision)
        self._sleep()
        return launched

    def tokens(self, launched: Launched) -> list[int]:
        self.now = time.monotonic()
        super().tokens(launched)
        self._sleep()
        return [TOKEN] * len(launched.decision.sampling)

    def _sleep(self) -> None:
        """Until the virtual clock's time: the end of a step that is waited for, or of one that keeps the host busy."""
        time.sleep(max(0.0, self.now - time.monotonic()))


def make_engine(system: System, cost: StepCost) -> Engine:
    """An engine that sleeps."""
    scheduler = system.scheduler()
    device = SleepingDevice(
        cost,
        seed=os.getpid(),
        overlap=system.overlap,
        drafting=system.drafting,
        num_stages=system.settings.num_stages,
    )
    loop = Loop(scheduler, device, overlap=system.overlap, clock=device.clock)
    return Engine(loop, OutputProcessor(scheduler, NoText))


def run(config: SleepingConfig, inbox: Iterator[Any], send_queue: SendQueue) -> None:
    """Serve until the server has closed the socket."""
    engine = make_engine(config.system, config.cost)
    time.sleep(max(0.0, config.asked_at + config.start_s - time.time()))
    settings, cache = engine.scheduler.settings, engine.scheduler.cache
    worker = start(engine, send_queue)
    tokens = cache.num_blocks // len(cache.groups) * cache.block_tokens
    send_queue.send(
        EngineReady(
            max_model_len=settings.max_model_len,
            phases=[("in all", time.time() - config.asked_at)],
            kv_tokens=tokens,
            kv_text=f"a KV cache of {tokens:,} tokens that nothing is written to",
            notes=(f"emulated: nothing is computed, step times are of the {config.cost.basis}",),
            lost_adapters={},
        )
    )
    none = Structures(None, settings.vocab)
    receiver = RequestReceiver(engine, worker, send_queue, structures=none, apart=none)
    for message in inbox:
        receiver.take(message)
    os._exit(0)


if __name__ == "__main__":
    main(run)
