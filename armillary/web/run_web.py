"""Start the page and serve it until SIGTERM."""

from __future__ import annotations

import secrets
import webbrowser
from pathlib import Path

from armillary.serving.http.server import (
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
from armillary.store.home import Home

GRACEFUL_S = 2
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def run_web(home: Home, listen: ListenOptions, *, say: Say, opens: bool = False, writes: Path | None = None) -> None:
    """Serve the page; an address that others can reach has a token in it. `writes`: folder for changed recipes."""
    require_http()
    from armillary.web.web_app import WebApp, is_loopback

    is_local = is_loopback(listen.host)
    token = "" if is_local else secrets.token_urlsafe(24)
    app = WebApp(home, token=token, hosts=LOOPBACK | {listen.host} if is_local else None, writes=writes)
    sock = bind(listen)
    app.warm_up()
    address = address_of(sock) + (f"/?token={token}" if token else "")
    does = f"changed recipes go to {writes}" if writes else "read-only"
    ignore_broken_pipe(say)(f"{address}   ({does}; Ctrl-C ends it)")
    if opens:
        webbrowser.open(address)
    run_event_loop(serve_until_signal(http_server(app, graceful_s=GRACEFUL_S), sock))
