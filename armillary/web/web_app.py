"""The web application: on loopback, or with a token where others can reach it.

Answers are made by the tabs, in threads. A page may load only itself: no script, style or request goes elsewhere. It
is read-only but for two actions that only its own pages can take: a chat, and a changed recipe where that is allowed.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from armillary.errors import ArmillaryError
from armillary.serving.http.asgi import AsgiConnection, BodyLimits, Headers, Receive, Send
from armillary.serving.http.problem import Problem
from armillary.store.home import Home
from armillary.web.chat_proxy import chat
from armillary.web.form import Query, View
from armillary.web.tabs import catalogue_tab, diagnose_tab, plan_tab, runs_tab
from armillary.web.tabs.diagnose_tab import DiagnoseTab
from armillary.web.tabs.plan_tab import BadField
from armillary.web.tabs.server_tab import ServeTab
from armillary.web.web_page import CHAT, Tab, page_html

COOKIE = "armillary_token"
SCRIPT = b"text/javascript; charset=utf-8"
STATIC = {"/web.js": SCRIPT, "/chat.js": SCRIPT, "/web.css": b"text/css; charset=utf-8"}
BODIES = BodyLimits(limit=1_000_000, total=16_000_000, timeout_s=30.0)
HTML = (b"content-type", b"text/html; charset=utf-8")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
GUARDS: Headers = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
ACTIONS = ("/chat", "/recipe")
Download = Callable[[Query, Home], tuple[str, bytes]]


class WebApp:
    """Routes of one page; `token` is needed where it is not empty, `hosts` are the names it may be called by, `writes`
    is the folder for changed recipes."""

    def __init__(
        self, home: Home, *, token: str = "", hosts: frozenset[str] | None = None, writes: Path | None = None
    ) -> None:
        self.home, self.token, self.hosts = home, token, hosts
        self.csrf = secrets.token_urlsafe(24)
        served, self.diagnoses = ServeTab(), DiagnoseTab(folder=writes, csrf=self.csrf)
        self.tabs: Mapping[str, Tab] = {
            "plan": Tab(title="Plan", fields=plan_tab.fields, view=plan_tab.view),
            "catalogue": Tab(title="Catalogue", fields=catalogue_tab.fields, view=catalogue_tab.view),
            "runs": Tab(title="Runs", fields=runs_tab.fields, view=runs_tab.view),
            "serve": Tab(title="Serve", fields=served.fields, view=served.view, below=CHAT),
            "diagnose": Tab(title="Diagnose", fields=self.diagnoses.fields, view=self.diagnoses.view),
        }
        self.downloads: Mapping[str, Download] = {"/document": plan_tab.document, "/recipe": diagnose_tab.recipe}

    def warm_up(self) -> None:
        """Read the catalogue before the first visitor waits for it."""
        page_html(self.tabs, "plan", {}, None, self.home)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn runs without lifespan and web sockets"
        connection = AsgiConnection(scope, receive, send)
        connection.extra_headers = list(GUARDS)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        try:
            self._check_caller(connection)
            if await self._logged_in(connection, query):
                return
            await (self._act(connection) if connection.method == "POST" else self._respond(connection, query))
        except Problem as problem:
            await connection.problem(problem)

    # --- who calls

    def _check_caller(self, connection: AsgiConnection) -> None:
        """Another site must not reach this one by a name that it has pointed here."""
        acts = connection.method == "POST" and connection.path in ACTIONS
        if connection.method not in ("GET", "HEAD") and not acts:
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

    # --- actions

    async def _act(self, connection: AsgiConnection) -> None:
        """A chat or a changed recipe, asked for by a page of ours: no other site knows its secret."""
        body = await connection.body(BODIES)
        form = {} if connection.path == "/chat" else dict(parse_qsl(body.decode("latin-1")))
        given = connection.headers.get(b"x-csrf-token", b"").decode("latin-1") or form.get("csrf", "")
        origin, host = connection.headers.get(b"origin"), connection.headers.get(b"host", b"")
        other = origin is not None and origin.partition(b"://")[2] != host
        if other or not hmac.compare_digest(given.encode(), self.csrf.encode()):
            raise Problem(403, "this did not come from a page of this server; reload the page and try again")
        if connection.path == "/chat":
            return await chat(connection, body)
        try:
            run = await asyncio.to_thread(self.diagnoses.write, form, self.home)
        except ArmillaryError as error:
            raise Problem(400, str(error)) from None
        back = f"./?{urlencode({'tab': 'diagnose', 'run': run})}"
        await connection.respond(303, b"", HTML, [(b"location", back.encode())])

    # --- answers

    async def _respond(self, connection: AsgiConnection, query: dict[str, str]) -> None:
        path = connection.path
        if path in STATIC:
            content = (files("armillary") / f"web/static{path}").read_bytes()
            return await connection.respond(200, content, (b"content-type", STATIC[path]))
        if path == "/favicon.ico":
            return await connection.respond(204, b"", HTML)
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
        await connection.respond(200, page_html(self.tabs, name, query, view, self.home, self.csrf).encode(), HTML)

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
