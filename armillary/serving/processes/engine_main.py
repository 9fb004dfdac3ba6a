"""The engine's own process: loads the model, takes requests from a socket, sends every step's tokens as one message.

`python -m armillary.serving.processes.engine_main FD`. The engine runs in a thread of its own; this one only reads the
socket, checks and hashes prompts. The process ends when the server's end of the socket is closed, however that came
about.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Iterator
from typing import Any

from armillary.engine.engine_thread import EngineThread
from armillary.engine.llm import LLM
from armillary.engine.output.output_text import Answers, NoText
from armillary.engine.output.structured import Structures
from armillary.engine.request.request import Request
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.engine.telemetry.gauge_log import GaugeLog
from armillary.errors import ArmillaryError
from armillary.serving.processes.engine_ipc import (
    INDEX_BITS,
    Abort,
    Failed,
    Orders,
    Outlet,
    Refused,
    Started,
    Submit,
    Turns,
    messages,
)
from armillary.serving.processes.grammar_queue import Busy, Compiling
from armillary.serving.processes.grammar_sandbox import Trials
from armillary.serving.processes.heartbeat import Pulse
from armillary.store.gauges import GaugeWriter

_WAIT_S = 30 * 86_400.0
"""ranks that follow may hear nothing for as long as nobody asks anything"""
assert INDEX_BITS >= 10, "an engine takes 1,024 answers to a prompt"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which tells us
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    inbox, outlet = messages(sock), Outlet(sock)
    orders = next(inbox, None)
    if orders is None:
        return
    try:
        run(orders, inbox, outlet)
    except ArmillaryError as error:
        outlet.send(Failed(message=" ".join(str(error).split()), by_user=True))
    except BaseException as error:
        traceback.print_exc()
        outlet.send(Failed(message=f"{type(error).__name__}: {error}", by_user=False))
    sys.stderr.flush()
    os._exit(1)  # other threads may hang; nothing here is worth waiting for


def run(orders: Orders, inbox: Iterator[Any], outlet: Outlet) -> None:
    """Load, say so, and serve until the server is gone."""
    from armillary.parallel.world import join_world

    phases = [("process", time.time() - orders.asked_at)]
    with join_world(orders.device, timeout_s=_WAIT_S) as world:
        record = _recorder(orders) if world.is_main else None
        llm = LLM(
            orders.model,
            orders.serve,
            home=orders.home,
            world=world,
            record=record.record if record is not None else None,
            phase=lambda name, seconds: phases.append((name, seconds)),
        )
        phases.append(("in all", time.time() - orders.asked_at))
        if world.is_main:
            worker = _start(llm, outlet)
            outlet.send(_started(llm, phases))
            intake = Intake(llm, worker, outlet)
            for message in inbox:
                intake.take(message)
            if record is not None:
                record.close()
        else:
            threading.Thread(target=_follow, args=(llm,), daemon=True).start()
            next(inbox, None)
        os._exit(0)


def _recorder(orders: Orders) -> GaugeLog | None:
    """None where nobody asked, or where there is no room to write."""
    if orders.gauges is None:
        return None
    try:
        return GaugeLog(GaugeWriter(orders.gauges))
    except ArmillaryError as error:
        print(f"nothing is recorded: {error}", file=sys.stderr)
        return None


def _follow(llm: LLM) -> None:
    try:
        llm.follow()
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # without its leader a rank is of no use


def _start(llm: LLM, outlet: Outlet) -> EngineThread:
    """Tokens go out as they are: text is made in the server."""
    llm.engine.answers = Answers(llm.engine.scheduler, NoText)
    worker = EngineThread(llm.engine, Turns(llm.engine.scheduler, outlet.send))
    worker.start()
    Pulse(worker, outlet.send).start()
    threading.Thread(target=_watch, args=(worker,), daemon=True).start()
    return worker


def _watch(worker: EngineThread) -> None:
    """An engine whose thread is over is of no use: the server starts another."""
    worker.join()
    os._exit(1 if worker.failure else 0)


def _started(llm: LLM, phases: list[tuple[str, float]]) -> Started:
    settings, cache = llm.engine.scheduler.settings, llm.engine.scheduler.cache
    return Started(
        max_model_len=settings.max_model_len,
        vocab=settings.vocab,
        phases=phases,
        kv_tokens=cache.num_blocks // len(cache.groups) * cache.block_tokens,
        kv_text=llm.plan.text((settings.max_model_len,)).splitlines()[0],
        notes=llm.notes,
    )


class Intake:
    """Passes requests on to the engine. Structures are compiled beside, as that may take seconds."""

    def __init__(self, llm: LLM, worker: EngineThread, outlet: Outlet) -> None:
        self._worker, self._outlet = worker, outlet
        trials = Trials(Structures(llm.tokenizer, llm.engine.scheduler.settings.vocab))
        self._compiling = Compiling(llm.structures, trials, self._submit, self._refuse)

    def take(self, message: Submit | Abort) -> None:
        """In the thread that reads the socket."""
        if isinstance(message, Abort):
            if message.index is None:
                self._compiling.give_up(message.number)
            self._worker.abort(str(message.number), message.index)
        elif message.params.structure is None:
            self._submit(message)
        else:
            self._compiling.take(message)

    def _submit(self, message: Submit, maker: MakeConstraint | None = None) -> None:
        request = Request(
            id=str(message.number),
            prompt=array("i", message.prompt).tolist(),
            params=message.params,
            timeout_s=message.timeout_s,
            priority=message.priority,
            salt=message.salt,
        )
        try:
            self._worker.submit(request, constraint=maker)
        except ArmillaryError as error:
            self._refuse(message, error)

    def _refuse(self, message: Submit, error: ArmillaryError) -> None:
        text = " ".join(str(error).split())
        self._outlet.send(Refused(number=message.number, message=text, busy=isinstance(error, Busy)))


if __name__ == "__main__":
    main()
