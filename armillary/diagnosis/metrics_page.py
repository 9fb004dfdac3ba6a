"""A server's metrics page as a Reading: means, percentiles and totals; two pages some seconds apart give rates too.

Percentiles are interpolated in the histograms' buckets, so they are as exact as those are fine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from armillary.diagnosis.prometheus import Histogram, Page, parse_page
from armillary.diagnosis.reading import Reading
from armillary.diagnosis.servers import SERVERS, Names, Server
from armillary.errors import BadData, NotFound
from armillary.spec.gauges import GAUGES
from armillary.store.home import Home

APART_S = 5.0
"""seconds between the two looks at a live page: some hundred engine steps"""
_TIMEOUT_S = 10.0
_MOST_BYTES = 16_000_000
_ENOUGH = 30
"""values a distribution must have gained between two looks for its percentiles to be taken from these alone"""
_PERCENTILES = (50, 90, 99)
_READS = ", ".join(server.name for server in SERVERS.values())


def read_metrics(target: str, home: Home | None = None, *, apart_s: float = APART_S,
                 wait: Callable[[float], None] = time.sleep) -> Reading:  # fmt: skip
    """The page behind a URL, looked at twice, or the page in a file."""
    if not target.startswith(("http://", "https://")):
        return reading_of_page(_file(Path(target)), source=target)
    url = page_url(target)
    first = _fetch(url)
    page = parse_page(first)
    own = _own_run(page, _server(page, url), home, target)
    if own is not None:
        return own
    begun = time.monotonic()
    wait(apart_s)
    second, seconds = _fetch(url), time.monotonic() - begun
    return reading_of_page(second, source=target, earlier=first, seconds=seconds)


def _own_run(page: Page, server: Server, home: Home | None, target: str) -> Reading | None:
    """A server of ours names its run: where that is in this home, it has the steps and requests a page lacks."""
    from armillary.diagnosis.read_run import read_run
    from armillary.store.runs import find_run

    name = page.labels(server.info).get("run", "") if server.name == "armillary" and home is not None else ""
    if not name or home is None:
        return None
    try:
        run = find_run(home, name)
    except NotFound:
        return None
    return replace(read_run(run, home), notes=(f"read from run {run.name}, which {target} writes",))


def is_page(path: Path) -> bool:
    """Whether a file looks like a metrics page of a server that is known here."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(1_000_000).decode(errors="replace")
    lines = (line.removeprefix("# HELP ").removeprefix("# TYPE ") for line in head.splitlines())
    prefixes = tuple(server.prefix for server in SERVERS.values())
    return any(line.startswith(prefixes) for line in lines)


def reading_of_page(text: str, *, source: str, earlier: str | None = None, seconds: float = 0.0) -> Reading:
    """What a page tells; with the page of `seconds` before, what happened in between."""
    page = parse_page(text)
    server = _server(page, source)
    before, notes = _before(page, earlier, server)
    seconds = seconds if before else 0.0
    values = dict(_values(page, server))
    totals = dict(_totals(page, server))
    values |= totals | _fractions(totals)
    values |= _distributions(page, before, server)
    values |= _derived(page, server, values)
    if before:
        gained = {name: total - before_total for name, before_total in _totals(before, server).items()
                  if (total := totals.get(name)) is not None}  # fmt: skip
        values |= _rates(gained, seconds) | _fractions(gained)
        notes = (*notes, f"looked at twice, {seconds:.0f} s apart")
    else:
        notes = (*notes, "one look at the page: means are since the server started; a URL is looked at twice")
    if not values.get("requests_total") and not values.get("running"):
        notes = (*notes, "no request has been answered yet: there is nothing to judge")
    settings, more = _settings(page, server, values)
    return Reading(source=source, kind="serving", by=server.name, settings=settings, values=values | more, notes=notes)


def page_url(target: str) -> str:
    """Where the metrics of a server are, given its address, its API's address or the page's own."""
    parts = urlsplit(target)
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.endswith("/metrics"):
        path += "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


# --- what is on the page


def _server(page: Page, source: str) -> Server:
    found = [(sum(name.startswith(server.prefix) for name in page.samples), server) for server in SERVERS.values()]
    most, server = max(found, key=lambda one: one[0])
    if not most:
        raise BadData(f"{source} is no metrics page of a server known here; give one of {_READS}")
    return server


def _before(page: Page, earlier: str | None, server: Server) -> tuple[Page | None, tuple[str, ...]]:
    """The earlier page, unless the server started again in between."""
    if earlier is None:
        return None, ()
    before = parse_page(earlier)
    now, then = dict(_totals(page, server)), dict(_totals(before, server))
    if any(now.get(name, total) < total for name, total in then.items()):
        return None, ("the server started again between the two looks: the first is left out",)
    return before, ()


def _first(page: Page, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in page), None)


def _values(page: Page, server: Server) -> Iterator[tuple[str, float]]:
    """Counts of all engines together; shares as their mean."""
    for gauge, names in server.values.items():
        name = _first(page, names)
        if name is None:
            continue
        found = page.mean(name) if gauge.endswith("_fraction") else page.total(name)
        if found is not None:
            yield gauge, found


def _totals(page: Page, server: Server) -> Mapping[str, float]:
    found = {gauge: page.total(name) for gauge, names in server.totals.items() if (name := _first(page, names))}
    return {gauge: total for gauge, total in found.items() if total is not None}


def _derived(page: Page, server: Server, values: Mapping[str, float]) -> dict[str, float]:
    """What a page leaves out and its other figures tell: requests answered, and the lengths of a mean request."""
    found: dict[str, float] = {}
    ended = next((one for name in server.histograms.get("e2e_s", ()) if (one := page.histogram(name))), None)
    requests = values.get("requests_total") or (ended.count if ended is not None else 0.0)
    if requests and "requests_total" not in values:
        found["requests_total"] = requests
    for total, each in (("tokens_in_total", "tokens_in"), ("tokens_out_total", "tokens_out")):
        if requests and each not in values and total in values:
            found[each] = values[total] / requests
    return found


def _fractions(totals: Mapping[str, float]) -> dict[str, float]:
    asked = totals.get("prefix_queries_total", 0.0)
    return {"prefix_hit_fraction": totals.get("prefix_hits_total", 0.0) / asked} if asked > 0 else {}


def _rates(gained: Mapping[str, float], seconds: float) -> dict[str, float]:
    names = {"requests_total": "requests_per_s", "tokens_in_total": "tokens_in_per_s",
             "tokens_out_total": "tokens_out_per_s"}  # fmt: skip
    return {rate: gained[total] / seconds for total, rate in names.items() if total in gained and seconds > 0}


def _distributions(page: Page, before: Page | None, server: Server) -> dict[str, float]:
    found: dict[str, float] = {}
    for gauge, histogram in _histograms(page, before, server.histograms):
        if histogram.mean is not None:
            found[gauge] = histogram.mean
        for percent in _PERCENTILES:
            name = f"{gauge.removesuffix('_s')}_p{percent}_s"
            value = histogram.quantile(percent / 100)
            if name in GAUGES and value is not None and len(histogram.bounds) > 1:
                found[name] = value
    steps = _histogram(page, before, server.step_tokens) if server.step_tokens else None
    return found | (_of_steps(page, server, steps) if steps is not None and steps.count else {})


def _histograms(page: Page, before: Page | None, names: Names) -> Iterator[tuple[str, Histogram]]:
    for gauge, known in names.items():
        for name in known:
            histogram = _histogram(page, before, name)
            if histogram is not None:
                yield gauge, histogram
                break


def _histogram(page: Page, before: Page | None, name: str) -> Histogram | None:
    """Of the time between two looks where enough happened, else since the start."""
    now, then = page.histogram(name), before.histogram(name) if before else None
    if now is None or then is None or now.bounds != then.bounds or now.count - then.count < _ENOUGH:
        return now
    return now.since(then)


def _of_steps(page: Page, server: Server, steps: Histogram) -> dict[str, float]:
    """Tokens of a step, by the shares of answers and prompts in all tokens."""
    tokens, totals = steps.mean or 0.0, _totals(page, server)
    answers, prompts = (totals.get(name, 0.0) for name in ("tokens_out_total", "tokens_in_total"))
    share = answers / (answers + prompts) if answers + prompts > 0 else 1.0
    return {"decode_tokens": tokens * share, "prefill_tokens": tokens * (1 - share)}


def _settings(page: Page, server: Server, values: Mapping[str, float]) -> tuple[dict[str, str], dict[str, float]]:
    """What the page says of the server's settings, and what follows from them."""
    found = page.labels(server.info) if server.info else {}
    found |= {"models": ", ".join(models)} if (models := _models(page, server)) else {}
    more: dict[str, float] = {}
    blocks, size = (_count(found.get(name)) for name in ("num_gpu_blocks", "block_size"))
    tokens = _count(found.get("kv_cache_size_tokens")) or (blocks * size if blocks and size else None)
    engines = _engines(page, server)
    if tokens and "kv_capacity_tokens" not in values:
        more["kv_capacity_tokens"] = tokens * engines
    if engines > 1:
        more["replicas"] = float(engines)
    return found, more


def _models(page: Page, server: Server) -> list[str]:
    name = _first(page, server.values.get("running", ()))
    return sorted({one.labels["model_name"] for one in page.find(name) if "model_name" in one.labels}) if name else []


def _engines(page: Page, server: Server) -> int:
    name = _first(page, server.values.get("running", ()))
    ranks = {one.labels.get("engine", one.labels.get("dp_rank", "")) for one in page.find(name)} if name else set()
    return max(1, len(ranks))


def _count(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


# --- where it is


def _file(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        raise NotFound(f"no file {path}; save the page with: curl -s http://HOST:PORT/metrics > {path.name}") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}); give a file with a metrics page") from None


def _fetch(url: str) -> str:
    try:
        with urlopen(Request(url, headers={"Accept": "text/plain"}), timeout=_TIMEOUT_S) as answer:
            return str(answer.read(_MOST_BYTES).decode(errors="replace"))
    except (URLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise NotFound(f"no metrics page at {url} ({why}); start the server, or give the address it prints") from None
