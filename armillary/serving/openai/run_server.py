"""Run the server: bind, start the engine, serve until a signal, let what is under way finish, and leave with 0."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from armillary.errors import BadInput, missing
from armillary.model.generation_config import sampling_defaults
from armillary.model.text.tokenizer import eos_ids_of
from armillary.serving.http.connections import protocol, sweep
from armillary.serving.http.lines import Say, to_whom_it_concerns
from armillary.serving.openai.served_model import Served
from armillary.serving.openai.tokenization import Texts
from armillary.serving.openai.tool_calls import family_of
from armillary.serving.openai.tracing import Tracing
from armillary.serving.processes.engine_client import EngineProcess
from armillary.serving.processes.engine_ipc import Orders
from armillary.serving.processes.server_metrics import Metrics
from armillary.store.resolve_model import ModelSource

if TYPE_CHECKING:
    import uvicorn

    from armillary.serving.openai.app import Api


_PRIVATE = ("api_key_file", "otlp")


@dataclass(frozen=True, kw_only=True)
class Door:
    """Where the server is found, and who may enter."""

    host: str = "127.0.0.1"
    """address it listens on; 0.0.0.0: all"""
    port: int = 8000
    """0: any that is free"""
    keys: tuple[str, ...] = ()
    """API keys; none: anybody may ask"""


def serve(source: ModelSource, orders: Orders, door: Door, *, ranks: int = 1, say: Say = print) -> None:
    """Serve until SIGTERM or SIGINT; ArmillaryError where the model or the port cannot be had."""
    _need_http()
    say, metrics = to_whom_it_concerns(say), Metrics()
    served = _served(source, orders, ranks, metrics, say)
    metrics.info = _info(served, orders)
    from armillary.serving.openai.app import Api  # what it is made of has just been looked for

    tracing = Tracing(orders.serve.otlp, served.name) if orders.serve.otlp else None
    app = Api(served, metrics, keys=door.keys, tracing=tracing, say=say)
    sock = bind(door.host, door.port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(app, sock, door, say))
    if tracing is not None:
        tracing.close()


def _need_http() -> None:
    try:
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing(str(error.name), "serving over HTTP", "http") from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _served(source: ModelSource, orders: Orders, ranks: int, metrics: Metrics, say: Say) -> Served:
    assert source.folder is not None, "a model that is served has weights"
    texts = Texts(source.folder, eos_ids_of(source.folder))
    family = family_of(texts.tokenizer.templates.values() if texts.tokenizer else ())
    serve = orders.serve
    defaults = sampling_defaults(source.folder if serve.generation_config == "auto" else None)
    if defaults.given:
        say(
            f"sampling defaults of the model (generation_config.json): {defaults}; --set serve.generation_config=none "
            "for neutral ones"
        )
    return Served(
        name=serve.name or source.name,
        texts=texts,
        serve=serve,
        created=int(time.time()),
        defaults=defaults,
        context=serve.max_model_len or source.config.context,
        tools=family if serve.tools == "auto" else serve.tools,
        engine=EngineProcess(orders, ranks=ranks, metrics=metrics, say=say),
    )


def _info(served: Served, orders: Orders) -> dict[str, str]:
    """What the server was set to, as `--set serve.KEY=` takes it; the run whose gauges the engine writes. Anybody may
    read it, so where keys are kept and traces go is left out."""
    run = {"run": orders.gauges.parent.name} if orders.gauges is not None else {}
    values = {
        name: "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in asdict(orders.serve).items()
        if name not in _PRIVATE
    }
    return {"model": served.name, **run, **values}


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, before anything is loaded: a port that is taken is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot listen on {host}:{port} ({why}); try another --port or --host") from None
    return sock


async def _serve(app: Api, sock: socket.socket, door: Door, say: Say) -> None:
    import uvicorn

    drain_s = app.served.serve.drain_s
    server = _quiet(uvicorn)(
        uvicorn.Config(
            app.app(),
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            http=protocol(),
            timeout_keep_alive=75,
            backlog=2048,
            timeout_graceful_shutdown=int(drain_s) + 10,
            server_header=False,
            date_header=False,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    sweeping = asyncio.create_task(sweep(server))
    _on_signals(app, server, say)
    try:
        starting = asyncio.create_task(_start(app, sock, door, say))
        await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is not None:
            server.should_exit = True
            await serving
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        await serving
    finally:
        sweeping.cancel()
        await app.served.engine.stop()


async def _start(app: Api, sock: socket.socket, door: Door, say: Say) -> None:
    """Load the model, and say how long that took."""
    started = await app.served.engine.start()
    gc.collect()
    gc.freeze()  # what stays for good is not looked through again while requests come and go
    host, port = sock.getsockname()[:2]
    parts = " · ".join(f"{name} {seconds:.2f} s" for name, seconds in started.phases)
    say(f"loaded: {parts}")
    for line in (started.kv_text, *started.notes):
        say(line)
    where = f"[{host}]" if ":" in host else host
    say(f"ready on http://{where}:{port} as '{app.served.name}' (chat page at /, docs at /openapi.json)")


def _quiet(uvicorn: Any) -> Any:
    """uvicorn's server without its signal handlers, which would end the process by the signal."""

    class Server(uvicorn.Server):  # type: ignore[misc]
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


def _on_signals(app: Api, server: uvicorn.Server, say: Say) -> None:
    """The first signal drains, the second ends what is left at once."""
    loop, drain_s = asyncio.get_running_loop(), app.served.serve.drain_s

    def cut() -> None:
        app.served.engine.give_up("the server is shutting down; ask another one")

    def on_signal() -> None:
        if app.draining:
            cut()
            server.force_exit = True
            return
        app.draining = server.should_exit = True
        if app.metrics.inflight:
            say(f"draining: {app.metrics.inflight} requests under way, at most {drain_s:g} s; once more ends them")
        loop.call_later(drain_s, cut)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
