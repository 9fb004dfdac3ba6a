"""Start-up and shutdown that both HTTP servers share: the socket, uvloop, uvicorn, signals and draining."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.errors import BadInput, missing
from armillary.serving.http.api_keys import read_keys
from armillary.serving.http.connections import protocol, sweep
from armillary.spec.tables.serve import Serve

if TYPE_CHECKING:
    import uvicorn

Say = Callable[[str], None]
BACKLOG = 2048
"""connections that the kernel queues before they are accepted"""
_KEEP_ALIVE_S = 75


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files in PEM format: a certificate with its chain, and its key."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """BadInput where they cannot be used."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
            text = f"the certificate {self.certificate} with the key {self.key} cannot be used ({why})"
            raise BadInput(f"{text}; give two PEM files that belong together") from None


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Address of a server (port 0: any free port), the API keys that it accepts (none: no key is required), and what it
    does around its routes."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    tls: Tls | None = None  # HTTPS instead of HTTP
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""  # that a proxy adds before the server's own paths
    access_log: Path | None = None


def listen_options(host: str, port: int, serve: Serve) -> ListenOptions:
    """Where and how a server with these settings listens."""
    if bool(serve.tls_certificate) != bool(serve.tls_key):
        raise BadInput("HTTPS needs both serve.tls_certificate and serve.tls_key; give both or neither")
    tls = None
    if serve.tls_certificate:
        tls = Tls(certificate=Path(serve.tls_certificate).expanduser(), key=Path(serve.tls_key).expanduser())
        tls.check()
    return ListenOptions(
        host=host,
        port=port,
        keys=read_keys(serve.api_key_file),
        tls=tls,
        cors_origins=serve.cors_origins,
        root_path=serve.root_path,
        access_log=Path(serve.access_log).expanduser() if serve.access_log else None,
    )


def require_http() -> None:
    """MissingPart where the `http` extra is not installed."""
    try:
        for name in ("msgspec", "prometheus_client", "starlette", "uvicorn"):
            import_module(name)
    except ModuleNotFoundError as error:
        raise missing(str(error.name), "serving over HTTP", "http") from None


def ignore_broken_pipe(say: Say) -> Say:
    """`say` for a pipe whose reader may close it: the line is lost and the server goes on."""

    def guarded(text: str) -> None:
        with suppress(OSError):
            say(text)

    return guarded


def bind(listen: ListenOptions) -> socket.socket:
    """The server's socket, bound before a model is loaded so that a port in use is reported at once."""
    host, port = listen.host, listen.port
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot listen on {host}:{port} ({why}); try another --port or --host") from None
    return sock


def address_of(sock: socket.socket, tls: Tls | None = None) -> str:
    """http://HOST:PORT of a bound socket."""
    host, port = sock.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_event_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on uvloop where it is installed, else on asyncio's own loop."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ModuleNotFoundError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def http_server(
    app: Any, *, graceful_s: int, lifespan: str = "off", tls: Tls | None = None, proxy_headers: bool = True
) -> uvicorn.Server:
    """uvicorn's server without its signal handlers, which would end the process by the signal. `proxy_headers`: the
    client's address is read from the headers of a proxy on this machine."""
    import uvicorn

    class Server(uvicorn.Server):  # type: ignore[misc]
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan=lifespan,
        ws="none",
        http=protocol(),
        timeout_keep_alive=_KEEP_ALIVE_S,
        backlog=BACKLOG,
        timeout_graceful_shutdown=graceful_s,
        server_header=False,
        date_header=False,
        proxy_headers=proxy_headers,
        ssl_certfile=tls.certificate if tls is not None else None,
        ssl_keyfile=tls.key if tls is not None else None,
    )
    return Server(config)


async def serve_until_signal(
    server: uvicorn.Server,
    sock: socket.socket,
    *,
    drain: Callable[[], None] = lambda: None,
    kill: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT: the first signal calls `drain` and lets open requests finish, the second calls
    `kill` and ends them."""

    def on_signal() -> None:
        if server.should_exit:
            kill()
            server.force_exit = True
            return
        server.should_exit = True
        drain()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    sweeper = asyncio.create_task(sweep(server))
    try:
        await server.serve(sockets=[sock])
    finally:
        sweeper.cancel()
