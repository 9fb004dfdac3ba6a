"""Run the predict server: load the model, listen, serve until a signal, drain, and exit with 0."""

import asyncio
from pathlib import Path

from armillary.serving.http.server import (
    BACKLOG,
    ListenOptions,
    Say,
    address_of,
    bind,
    http_server,
    ignore_broken_pipe,
    require_http,
    run_event_loop,
    serve_until_signal,
)
from armillary.serving.predict.trusted_files import FileTrust
from armillary.serving.predict.versions import newest
from armillary.spec.tables.serve import Predict


def serve(path: Path, settings: Predict, listen: ListenOptions, *, trust: FileTrust, say: Say = print) -> None:
    """Serve the model at `path` until SIGTERM or SIGINT."""
    newest(path)
    require_http()
    from armillary.serving.http.front import Front
    from armillary.serving.predict.app import PredictServer, make_app

    say, sock = ignore_broken_pipe(say), bind(listen)
    state = PredictServer(path, settings, say, trust=trust, keys=listen.keys)
    try:
        asyncio.run(state.models.load())  # before the server starts, so that a broken model is one line
    except BaseException:
        sock.close()
        raise
    sock.listen(BACKLOG)  # before the server is reported ready
    front = Front(make_app(state), listen, say)
    server = http_server(front, graceful_s=max(1, round(settings.grace_s)), lifespan="on", tls=listen.tls)
    batches = f"batches of up to {settings.max_batch} rows, delay of at most {1e3 * settings.max_delay_s:g} ms"
    say(f"ready on {address_of(sock, listen.tls)}/predict · {batches}")
    try:
        run_event_loop(serve_until_signal(server, sock))
    finally:
        front.close()
