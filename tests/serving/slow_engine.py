"""An engine's process without a model: its first token says how its steps are. For tests of what the server does."""

from __future__ import annotations

import socket
import sys
import threading
import time

from armillary.engine.output.structured import Structures
from armillary.engine.scheduler.decision import Decision, StepWork
from armillary.engine.telemetry.step_calibration import StepShape, decision_of
from armillary.serving.processes import engine_main
from armillary.serving.processes.engine_ipc import EngineReady, SendQueue
from armillary.serving.processes.worker_process import messages
from tests.engine.fake import FakeExecutor
from tests.engine.test_engine import make_engine

SLOW, STUCK, QUICK = 5, 6, 7
"""a step as slow as it is expected to be; one that never ends; one that takes no time"""
SLOW_S = 5.0


class Executor(FakeExecutor):
    def launch(self, decision: Decision) -> list[int]:
        kinds = {seq.request.prompt[0] for seq in decision.sampling}
        if SLOW in kinds:
            time.sleep(SLOW_S)
        elif STUCK in kinds:
            threading.Event().wait()
        return super().launch(decision)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    inbox, outlet = messages(sock), SendQueue(sock)
    next(inbox)
    engine = make_engine(overlap=False)
    engine.loop.executor = Executor(engine.scheduler.cache, engine.scheduler.settings.max_running)
    # as a calibration would have found: eight tokens take as long as they do, a single one no time
    engine.loop.times.learn(work(8), SLOW_S)
    engine.loop.times.learn(work(1), 0.001)
    worker = engine_main.start(engine, outlet)
    outlet.send(EngineReady(max_model_len=64, kv_tokens=160, kv_text="", phases=[("in all", 0.0)]))
    none = Structures(None, 64)
    intake = engine_main.RequestReceiver(engine, worker, outlet, structures=none, apart=none)
    for message in inbox:
        intake.take(message)


def work(tokens: int) -> StepWork:
    from tests.engine.fake import make_scheduler

    return decision_of(StepShape(prompts=1, size=tokens), make_scheduler().cache).work


if __name__ == "__main__":
    main()
