"""Run the predict server: load, listen, serve until a signal, finish what is under way, leave with 0."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, missing
from armillary.serving.http.connections import protocol, sweep
from armillary.serving.http.lines import to_whom_it_concerns
from armillary.serving.predict.hot_reload import Say
from armillary.serving.predict.trust import Trust
from armillary.serving.predict.versions import newest
from armillary.spec.tables.predict import Predict

_BACKLOG = 2048


def run(
    path: Path,
    settings: Predict,
    *,
    trust: Trust,
    keys: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    say: Say = print,
) -> None:
    """Serve the model at `path` until SIGTERM or SIGINT, to whoever has one of the `keys`, or to all."""
    newest(path)
    say, uvicorn = to_whom_it_concerns(say), _uvicorn()
    from armillary.serving.predict.app import PredictServer, make_app

    listener = _listen(host, port)
    address, number = listener.getsockname()[:2]
    state = PredictServer(path, settings, say, trust=trust, keys=keys)
    try:
        asyncio.run(state.live.load())  # here, where a model that cannot be served is one line
    except BaseException:
        listener.close()
        raise
    listener.listen(_BACKLOG)  # before it is said to be ready
    grace = max(1, round(settings.grace_s))
    config = uvicorn.Config(
        make_app(state),
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        http=protocol(),
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=grace,
    )
    server = _own_signals(uvicorn)(config)
    batches = f"batches of up to {settings.max_batch}, {1e3 * settings.max_delay_s:g} ms of delay at most"
    say(f"ready on http://{address}:{number}/predict · {batches}")
    with asyncio.Runner(loop_factory=_quick_loop()) as runner:
        runner.run(_serve(server, listener))


async def _serve(server: Any, listener: socket.socket) -> None:
    """Until a signal; connections that only cost are closed meanwhile."""
    sweeping = asyncio.create_task(sweep(server))
    try:
        await server.serve(sockets=[listener])
    finally:
        sweeping.cancel()


def _quick_loop() -> Any:
    """uvloop's, where it is installed; none: the standard one."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _uvicorn() -> Any:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise missing(error.name or "uvicorn", "serving over HTTP", "http") from None
    return uvicorn


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise BadInput(
            f"cannot listen at {host}:{port} ({error.strerror}); try --port 0 for any that is free"
        ) from None
    return listener


def _own_signals(uvicorn: Any) -> Any:
    """uvicorn's server, which after a signal drains and returns instead of ending the process by the signal."""

    class Server(uvicorn.Server):  # type: ignore[misc]
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    return Server
