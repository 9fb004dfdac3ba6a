"""The tab Serve: latencies, queue and KV cache of a server on this machine, read from its metrics page; replicas and
scaling decisions of the services that run here."""

from __future__ import annotations

import ipaddress
import time
from collections import deque
from html import escape
from threading import Lock
from urllib.parse import urlsplit

from armillary.diagnosis.evidence.finding import value_text
from armillary.diagnosis.readings.metrics_page import fetch_page, page_url, reading_of_page
from armillary.errors import ArmillaryError
from armillary.report.charts import lines
from armillary.report.page import section, table
from armillary.store.home import Home
from armillary.units import seconds_text
from armillary.web.form import Field, Query, View, value_of
from armillary.web.tabs.scaling_decisions import scaling_decisions

URL = Field(name="url", label="Server", default="http://127.0.0.1:8000", wide=True)
REFRESH_S = 2.0
WINDOW_S = 10.0
"""seconds over which latencies and rates are taken"""
MOST_SCRAPES, MOST_SERVERS = 600, 8
LATENCIES = ("ttft_s", "itl_s", "queue_s", "e2e_s")
GAUGES = (
    *LATENCIES,
    "running",
    "waiting",
    "kv_used_fraction",
    "requests_per_s",
    "tokens_out_per_s",
    "prefix_hit_fraction",
    "preemptions_total",
    "rejected_total",
    "replicas",
)
Scrape = tuple[float, str, dict[str, float]]
"""when, the page, the figures"""


class ServeTab:
    """Scrapes servers, and remembers the last ones for the charts."""

    def __init__(self) -> None:
        self._scrapes: dict[str, deque[Scrape]] = {}
        self._lock = Lock()

    def fields(self, query: Query, home: Home) -> list[Field]:
        return [URL]

    def view(self, query: Query, home: Home) -> View:
        url = value_of(query, URL)
        if not is_loopback(url):
            message = f"{url} is not on this machine; give an address like {URL.default}, or start armillary web there"
            return View(errors={"url": message})
        try:
            scrapes = self._scrape(url)
        except ArmillaryError as error:
            seen = url in self._scrapes  # then the last result stays
            return View(html="" if seen else scaling_decisions(home), errors={"url": str(error)}, refresh_s=REFRESH_S)
        return View(html=_now(url, scrapes) + _charts(scrapes) + scaling_decisions(home), refresh_s=REFRESH_S)

    def _scrape(self, url: str) -> list[Scrape]:
        """One more scrape of the server, after those that were taken before."""
        page, now = fetch_page(page_url(url)), time.monotonic()
        with self._lock:
            if url not in self._scrapes and len(self._scrapes) >= MOST_SERVERS:
                self._scrapes.pop(next(iter(self._scrapes)))
            scrapes = self._scrapes.setdefault(url, deque(maxlen=MOST_SCRAPES))
            before = next((scrape for scrape in scrapes if now - scrape[0] <= WINDOW_S), None)
            scrapes.append((now, page, _values(url, page, before, now)))
            return list(scrapes)


def is_loopback(url: str) -> bool:
    """Whether a URL is one of this machine: a page must not become a way into a network."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not host:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _values(url: str, page: str, before: Scrape | None, now: float) -> dict[str, float]:
    earlier, seconds = (before[1], now - before[0]) if before else (None, 0.0)
    reading = reading_of_page(page, source=url, earlier=earlier, seconds=seconds)
    return {name: value for name in GAUGES if (value := reading.get(name)) is not None}


def _now(url: str, scrapes: list[Scrape]) -> str:
    values = scrapes[-1][2]
    rows = [(name, value_text(name, value)) for name, value in values.items()]
    page = f"<p><a href='{escape(url, quote=True)}'>The server's own page</a></p>"
    return section("Now", page + table(("gauge", "value"), rows))


def _charts(scrapes: list[Scrape]) -> str:
    begin = scrapes[0][0]
    groups = (
        ("Latencies", LATENCIES[:3], seconds_text),
        ("Requests", ("running", "waiting"), lambda value: f"{value:,.0f}"),
        ("Throughput", ("tokens_out_per_s",), lambda value: f"{value:,.3g} tokens/s"),
        ("KV cache in use", ("kv_used_fraction",), lambda value: f"{value:.1%}"),
        ("Replicas", ("replicas",), lambda value: f"{value:g}"),
    )
    parts = []
    for title, names, text in groups:
        series = [
            (name, [(when - begin, values[name]) for when, _, values in scrapes if name in values]) for name in names
        ]
        chart = lines(series, label=f"{title} over time", x_name="seconds", y_text=text)
        parts.append(section(title, chart if len(scrapes) > 1 else ""))
    return "".join(parts)
