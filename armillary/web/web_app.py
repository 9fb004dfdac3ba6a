"""The web application: GET only, on loopback, or with a token where others can reach it.

Answers are made by the tabs, in threads. A page may load only itself: no script, style or request goes elsewhere.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote

from armillary.errors import ArmillaryError
from armillary.serving.http.asgi import AsgiConnection, Headers, Receive, Send
from armillary.serving.http.problem import Problem
from armillary.store.home import Home
from armillary.web.form import Query, View
from armillary.web.tabs import catalogue_tab, diagnose_tab, plan_tab, runs_tab
from armillary.web.tabs.plan_tab import BadField
from armillary.web.tabs.server_tab import ServeTab
from armillary.web.web_page import Tab, page_html

COOKIE = "armillary_token"
STATIC = {"/web.js": b"text/javascript; charset=utf-8", "/web.css": b"text/css; charset=utf-8"}
HTML = (b"content-type", b"text/html; charset=utf-8")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
GUARDS: Headers = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
Download = Callable[[Query, Home], tuple[str, bytes]]


class WebApp:
    """Routes of one page; `token` is needed where it is not empty, `hosts` are the names it may be called by."""

    def __init__(self, home: Home, *, token: str = "", hosts: frozenset[str] | None = None) -> None:
        self.home, self.token, self.hosts = home, token, hosts
        served = ServeTab()
        self.tabs: Mapping[str, Tab] = {
            "plan": Tab(title="Plan", fields=plan_tab.fields, view=plan_tab.view),
            "catalogue": Tab(title="Catalogue", fields=catalogue_tab.fields, view=catalogue_tab.view),
            "runs": Tab(title="Runs", fields=runs_tab.fields, view=runs_tab.view),
            "serve": Tab(title="Serve", fields=served.fields, view=served.view),
            "diagnose": Tab(title="Diagnose", fields=diagnose_tab.fields, view=diagnose_tab.view),
        }
        self.downloads: Mapping[str, Download] = {"/document": plan_tab.document, "/recipe": diagnose_tab.recipe}

    def warm_up(self) -> None:
        """Read the catalogue before the first visitor waits for it."""
        page_html(self.tabs, "plan", {}, None)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn runs without lifespan and web sockets"
        connection = AsgiConnection(scope, receive, send)
        connection.extra_headers = list(GUARDS)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        try:
            self._check_caller(connection)
            if not await self._logged_in(connection, query):
                await self._respond(connection, query)
        except Problem as problem:
            await connection.problem(problem)

    # --- who calls

    def _check_caller(self, connection: AsgiConnection) -> None:
        """Another site must not reach this one by a name that it has pointed here."""
        if connection.method not in ("GET", "HEAD"):
            raise Problem(405, "this page is read-only; use GET")
        host = connection.headers.get(b"host", b"").decode("latin-1").rpartition(":")[0] or ""
        if self.hosts is not None and host.strip("[]") not in self.hosts:
            raise Problem(403, "this page is not known by that name; use the address that armillary web printed")

    async def _logged_in(self, connection: AsgiConnection, query: dict[str, str]) -> bool:
        """Whether the request was answered here: a token in the address becomes a cookie."""
        if not self.token:
            return False
        if hmac.compare_digest(query.get("token", "").encode(), self.token.encode()):
            cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            await connection.respond(303, b"", HTML, [(b"location", b"./"), (b"set-cookie", cookie.encode())])
            return True
        if hmac.compare_digest(_cookie(connection).encode(), self.token.encode()):
            return False
        raise Problem(401, "this page needs its token; open the address that armillary web printed")

    # --- answers

    async def _respond(self, connection: AsgiConnection, query: dict[str, str]) -> None:
        path = connection.path
        if path in STATIC:
            content = (files("armillary") / f"web/static{path}").read_bytes()
            return await connection.respond(200, content, (b"content-type", STATIC[path]))
        if path in self.downloads:
            return await self._download(connection, self.downloads[path], query)
        if path not in ("/", "/part"):
            raise Problem(404, f"nothing is at {path}; open /")
        name = query.get("tab", "plan")
        if name not in self.tabs:
            raise Problem(404, f"no tab '{name}'; there are {', '.join(self.tabs)}")
        wanted = path == "/part" or "show" in query
        view = await asyncio.to_thread(self.tabs[name].view, query, self.home) if wanted else None
        if path == "/part":
            assert view is not None
            return await connection.json(200, _plain(view))
        await connection.respond(200, page_html(self.tabs, name, query, view).encode(), HTML)

    async def _download(self, connection: AsgiConnection, make: Download, query: Query) -> None:
        try:
            name, content = await asyncio.to_thread(make, query, self.home)
        except (ArmillaryError, BadField) as error:
            raise Problem(400, str(error)) from None
        attachment = f"attachment; filename*=UTF-8''{quote(name)}".encode()
        kind = (b"content-type", b"application/octet-stream")
        await connection.respond(200, content, kind, [(b"content-disposition", attachment)])


def _plain(view: View) -> dict[str, Any]:
    return {"html": view.html, "errors": dict(view.errors), "refresh_s": view.refresh_s}


def _cookie(connection: AsgiConnection) -> str:
    texts = connection.headers.get(b"cookie", b"").decode("latin-1").split(";")
    cookies = [text.strip().partition("=") for text in texts]
    return next((value for name, _, value in cookies if name == COOKIE), "")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
