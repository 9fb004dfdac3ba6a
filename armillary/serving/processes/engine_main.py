"""The engine's process: loads the model, reads requests from a socket, sends the tokens of each step as one message.

`python -m armillary.serving.processes.engine_main FD`. The engine runs in its own thread; the main thread reads the
socket, and checks and hashes prompts. The process ends when the server's end of the socket is closed.
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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.engine.engine import Engine
from armillary.engine.engine_thread import EngineThread
from armillary.engine.output.output_text import NoText, OutputProcessor
from armillary.engine.output.structured import Structures
from armillary.engine.request.request import Request
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.engine.telemetry.gauges import GaugeLog
from armillary.errors import ArmillaryError, BadInput, Overloaded
from armillary.serving.processes.engine_ipc import (
    INDEX_BITS,
    Abort,
    AdapterResult,
    EngineConfig,
    EngineReady,
    Failed,
    LoadAdapter,
    OutputSender,
    Refused,
    SendQueue,
    Submit,
    UnloadAdapter,
)
from armillary.serving.processes.grammar_queue import GrammarQueue
from armillary.serving.processes.grammar_sandbox import GrammarSandbox
from armillary.serving.processes.heartbeat import Heartbeat
from armillary.serving.processes.worker_process import messages
from armillary.spec.hf.user_family import load_family_file
from armillary.store.gauges import GaugeWriter

if TYPE_CHECKING:
    from armillary.engine.llm import LLM
    from armillary.engine.runner.tensor_parallel import Obeys

_WAIT_S = 30 * 86_400.0
"""collective timeout of the other ranks, which receive nothing while the server is idle"""
assert INDEX_BITS >= 10, "an engine accepts 1,024 sequences per prompt"


Run = Callable[[Any, Iterator[Any], SendQueue], None]
"""(first message, the others, what is sent back): an engine from its start to its end"""


def main(run: Run) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the socket
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    inbox, send_queue = messages(sock), SendQueue(sock)
    config = next(inbox, None)
    if config is None:
        return
    try:
        run(config, inbox, send_queue)
    except ArmillaryError as error:
        send_queue.send(Failed(message=" ".join(str(error).split()), by_user=True))
    except BaseException as error:
        traceback.print_exc()
        send_queue.send(Failed(message=f"{type(error).__name__}: {error}", by_user=False))
    sys.stderr.flush()
    os._exit(1)  # without waiting for other threads, which may hang


def run(config: EngineConfig, inbox: Iterator[Any], send_queue: SendQueue) -> None:
    """Load the model, report it, and serve until the server has closed the socket."""
    from armillary.engine.disaggregation.roles import connect, follower
    from armillary.engine.llm import LLM
    from armillary.parallel.world import join_world

    phases = [("process", time.time() - config.asked_at)]
    for file in config.model_code:
        load_family_file(file)
    with join_world(config.device, timeout_s=_WAIT_S) as world:
        record = _recorder(config) if world.is_main else None
        llm = LLM(
            config.model,
            config.serve,
            home=config.home,
            world=world,
            record=record.record if record is not None else None,
            phase=lambda name, seconds: phases.append((name, seconds)),
        )
        phases.append(("in all", time.time() - config.asked_at))
        if world.is_main:
            lost = _load_adapters(llm, config.adapters)
            worker = start(llm.engine, send_queue)
            if config.serve.role != "combined":
                group = None if llm.ranks is None else llm.ranks.world
                connect(llm.engine, worker, config.serve, Path(config.model), group)
            send_queue.send(_started(llm, phases, lost))
            apart = Structures(llm.tokenizer, llm.engine.scheduler.settings.vocab)
            receiver = RequestReceiver(llm.engine, worker, send_queue, structures=llm.structures, apart=apart)
            for message in inbox:
                receiver.take(message)
            if record is not None:
                record.close()
        else:
            assert llm.ranks is not None
            transfer = follower(llm.engine, config.serve, llm.ranks.world) if config.serve.role != "combined" else None
            threading.Thread(target=_follow, args=(llm, transfer), daemon=True).start()
            next(inbox, None)
        os._exit(0)


def _recorder(config: EngineConfig) -> GaugeLog | None:
    """None where gauges are not recorded, or cannot be written."""
    if config.gauges is None:
        return None
    try:
        return GaugeLog(GaugeWriter(config.gauges))
    except ArmillaryError as error:
        print(f"nothing is recorded: {error}", file=sys.stderr)
        return None


def _follow(llm: LLM, transfer: Obeys | None) -> None:
    try:
        llm.follow(transfer)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # a rank is of no use without rank 0


def start(engine: Engine, send_queue: SendQueue) -> EngineThread:
    """Start the engine's thread; it sends token ids, which the server detokenizes."""
    engine.output_processor = OutputProcessor(engine.scheduler, NoText)
    worker = EngineThread(engine, OutputSender(engine.state, send_queue.send))
    worker.start()
    Heartbeat(worker, send_queue.send).start()
    threading.Thread(target=_watch, args=(worker,), daemon=True).start()
    return worker


def _watch(worker: EngineThread) -> None:
    """End the process when the engine's thread ends, so that the server starts another."""
    worker.join()
    os._exit(1 if worker.failure else 0)


def _load_adapters(llm: LLM, adapters: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Key -> error of those that cannot be loaded."""
    table, lost = llm.engine.adapters, {}
    assert table is not None
    for key, folder in adapters:
        try:
            table.add(key, table.read(folder))
        except BadInput as error:
            lost[key] = str(error)
    return lost


def _started(llm: LLM, phases: list[tuple[str, float]], lost: dict[str, str]) -> EngineReady:
    settings, caches = llm.engine.scheduler.settings, llm.engine.scheduler.caches
    return EngineReady(
        max_model_len=settings.max_model_len,
        phases=phases,
        kv_tokens=sum(cache.capacity_tokens for cache in caches),
        kv_text=llm.plan.text((settings.max_model_len,)).splitlines()[0],
        notes=llm.notes,
        lost_adapters=lost,
    )


class RequestReceiver:
    """Submits requests to the engine; grammars are compiled in another thread, as that may take seconds."""

    def __init__(
        self,
        engine: Engine,
        worker: EngineThread,
        send_queue: SendQueue,
        *,
        structures: Structures,
        apart: Structures,
    ) -> None:
        """`apart`: compiles every grammar first, in a process of its own."""
        self._worker, self._send_queue = worker, send_queue
        self._adapters = engine.adapters
        self._grammars = GrammarQueue(structures, GrammarSandbox(apart), self._submit, self._refuse)

    def take(self, message: Submit | Abort | LoadAdapter | UnloadAdapter) -> None:
        """In the thread that reads the socket."""
        if isinstance(message, LoadAdapter):
            threading.Thread(target=self._load, args=(message,), name="adapter", daemon=True).start()
        elif isinstance(message, UnloadAdapter):
            assert self._adapters is not None
            self._worker.between_steps(partial(self._adapters.remove, message.key))
        elif isinstance(message, Abort):
            if message.index is None:
                self._grammars.discard(message.number)
            self._worker.abort(str(message.number), message.index)
        elif message.params.structure is None:
            self._submit(message)
        else:
            self._grammars.take(message)

    def _load(self, message: LoadAdapter) -> None:
        """In a thread: read an adapter, and write it into its slot between two steps."""
        table = self._adapters
        assert table is not None

        def add() -> None:
            try:
                table.add(message.key, adapter)
                self._send_queue.send(AdapterResult(number=message.number))
            except BadInput as error:
                self._send_queue.send(AdapterResult(number=message.number, error=str(error)))

        try:
            adapter = table.read(message.folder)
        except BadInput as error:
            self._send_queue.send(AdapterResult(number=message.number, error=str(error)))
        else:
            self._worker.between_steps(add)

    def _submit(self, message: Submit, maker: MakeConstraint | None = None) -> None:
        request = Request(
            id=str(message.number),
            prompt=array("i", message.prompt).tolist(),
            params=message.params,
            timeout_s=message.timeout_s,
            priority=message.priority,
            salt=message.salt,
            adapter=message.adapter,
        )
        try:
            self._worker.submit(request, constraint=maker)
        except ArmillaryError as error:
            self._refuse(message, error)

    def _refuse(self, message: Submit, error: ArmillaryError) -> None:
        text = " ".join(str(error).split())
        code = getattr(error, "code", None)
        overloaded = isinstance(error, Overloaded)
        self._send_queue.send(Refused(number=message.number, message=text, code=code, overloaded=overloaded))


if __name__ == "__main__":
    main(run)
