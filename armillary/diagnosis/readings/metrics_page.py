"""A server's metrics page as a Reading: means, percentiles and totals; two pages some seconds apart give rates too.

Percentiles are interpolated in the histograms' buckets, so they are as exact as those are fine.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from armillary.diagnosis.readings.dcgm_page import PREFIX as DCGM
from armillary.diagnosis.readings.dcgm_page import is_dcgm_page, read_dcgm_page
from armillary.diagnosis.readings.gateway_page import is_gateway_page, read_gateway_page
from armillary.diagnosis.readings.metrics_scrapes import Scrapes, first_of, totals_of
from armillary.diagnosis.readings.prometheus import Page, number_of, parse_page
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.server_metrics import SERVERS, Server
from armillary.errors import BadData, NotFound
from armillary.spec.gauges import GAUGES, SLO_LIMITS, prometheus_name
from armillary.store.home import Home

APART_S = 5.0
"""seconds between the two scrapes of a live page: some hundred engine steps"""
_TIMEOUT_S = 10.0
_MOST_BYTES = 16_000_000
_READS = ", ".join(server.name for server in SERVERS.values())


def read_metrics(
    target: str, home: Home | None = None, *, apart_s: float = APART_S, wait: Callable[[float], None] = time.sleep
) -> Reading:
    """The page behind a URL, scraped twice, or the page in a file."""
    if not target.startswith(("http://", "https://")):
        return reading_of_page(_file(Path(target)), source=target)
    url = page_url(target)
    first = fetch_page(url)
    page = parse_page(first)
    own = None if is_dcgm_page(page) else _own_run(page, _server(page, url), home, target)
    if own is not None:
        return own
    begin = time.monotonic()
    wait(apart_s)
    return reading_of_page(fetch_page(url), source=target, earlier=first, seconds=time.monotonic() - begin)


def _own_run(page: Page, server: Server, home: Home | None, target: str) -> Reading | None:
    """A server of ours names its run: where that is in this home, it has the steps and requests a page lacks."""
    from armillary.diagnosis.readings.run_folder import read_run
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
    prefixes = (DCGM, *(server.prefix for server in SERVERS.values()))
    return any(line.startswith(prefixes) for line in lines)


def reading_of_page(text: str, *, source: str, earlier: str | None = None, seconds: float = 0.0) -> Reading:
    """What a page tells; with the page of `seconds` before, what happened in between. Safety SLOs that are missed are
    noted of every kind of page."""
    page = parse_page(text)
    reading = _reading(page, source, earlier, seconds)
    return replace(reading, notes=(*reading.notes, *_missed_safety_slos(page)))


def _missed_safety_slos(page: Page) -> Iterator[str]:
    for name, limit_name in SLO_LIMITS.items():
        value, limit = (page.total(prometheus_name(gauge)) for gauge in (name, limit_name))
        if value is not None and limit is not None and value > limit:
            yield f"safety SLO: {GAUGES[name].meaning} is {value:.3g}, above its limit of {limit:.3g}"


def _reading(page: Page, source: str, earlier: str | None, seconds: float) -> Reading:
    read = read_gateway_page if is_gateway_page(page) else read_dcgm_page if is_dcgm_page(page) else None
    if read is not None:
        looked = () if earlier is None else (f"looked at twice, {seconds:.0f} s apart",)
        return read(page, source, None if earlier is None else parse_page(earlier), looked)
    server = _server(page, source)
    before, notes = _before(page, earlier, server)
    scrapes = Scrapes(server=server, now=page, before=before, seconds=seconds if before else 0.0)
    values = scrapes.figures()
    settings, more = _settings(page, server, values)
    means = busy_means(scrapes, values | more)
    notes += (
        (f"looked at twice, {seconds:.0f} s apart",)
        if before is not None
        else ("one look at the page: means are since the server started; a URL is looked at twice",)
    )
    if not values.get("requests_total") and not values.get("running"):
        notes += ("no request has been answered yet: there is nothing to judge",)
    if means:
        notes += ("nobody is there now: batch, queue and cache are means over the steps that were taken",)
    return Reading(
        source=source, kind="serving", by=server.name, settings=settings, values=values | more | means, notes=notes
    )


def page_url(target: str) -> str:
    """Where the metrics of a server are, given its address, its API's address or the page's own."""
    parts = urlsplit(target)
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.endswith("/metrics"):
        path += "/metrics"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


# --- what is on the page


def _server(page: Page, source: str) -> Server:
    matches = [(sum(name.startswith(server.prefix) for name in page.samples), server) for server in SERVERS.values()]
    most, server = max(matches, key=lambda match: (match[0] and match[1].prefix == "armillary_", match[0]))
    if not most:
        raise BadData(f"{source} is no metrics page of a server known here; give one of {_READS}")
    return server


def _before(page: Page, earlier: str | None, server: Server) -> tuple[Page | None, tuple[str, ...]]:
    """The earlier page, unless the server restarted in between."""
    if earlier is None:
        return None, ()
    before = parse_page(earlier)
    now, then = totals_of(page, server), totals_of(before, server)
    if any(now.get(name, total) < total for name, total in then.items()):
        return None, ("the server restarted between the two looks: the first is left out",)
    return before, ()


def _settings(page: Page, server: Server, values: Mapping[str, float]) -> tuple[dict[str, str], dict[str, float]]:
    """What the page says of the server's settings, and what follows from them."""
    settings = page.labels(server.info) if server.info else {}
    running = first_of(page, server.values.get("running", ()))
    labels = [sample.labels for sample in page.find(running)] if running else []
    if models := sorted({each["model_name"] for each in labels if "model_name" in each}):
        settings["models"] = ", ".join(models)
    more: dict[str, float] = {}
    blocks, size = (number_of(settings.get(name)) for name in ("num_gpu_blocks", "block_size"))
    tokens = number_of(settings.get("kv_cache_size_tokens")) or (blocks * size if blocks and size else None)
    engines = max(1, len({each.get("engine", each.get("dp_rank", "")) for each in labels}))
    if tokens and "kv_capacity_tokens" not in values:
        more["kv_capacity_tokens"] = tokens * engines
    if engines > 1:
        more["replicas"] = float(engines)
    return settings, more | adapters_of(page, server)


def adapters_of(page: Page, server: Server) -> dict[str, float]:
    """LoRA adapters of running and of waiting requests: the latest of the sets that the page has kept."""
    sets = page.find(server.adapters) if server.adapters else ()
    if not sets:
        return {}
    labels = max(sets, key=lambda sample: sample.value).labels
    running, waiting = (
        {name.strip() for name in labels.get(f"{state}_lora_adapters", "").split(",") if name.strip()}
        for state in ("running", "waiting")
    )
    return {
        "adapter_slots": number_of(labels.get("max_lora")) or 0.0,
        "adapters_running": float(len(running)),
        "adapters_waiting": float(len(waiting - running)),
    }


# --- where it is


def _file(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        raise NotFound(f"no file {path}; save the page with: curl -s http://HOST:PORT/metrics > {path.name}") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}); give a file with a metrics page") from None


def fetch_page(url: str) -> str:
    """The text of a metrics page; NotFound where nobody serves one."""
    try:
        with urlopen(Request(url, headers={"Accept": "text/plain"}), timeout=_TIMEOUT_S) as answer:
            return str(answer.read(_MOST_BYTES).decode(errors="replace"))
    except (URLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise NotFound(f"no metrics page at {url} ({why}); start the server, or give the address it prints") from None


# --- means of a page without requests now


def busy_means(scrapes: Scrapes, values: Mapping[str, float]) -> dict[str, float]:
    """Requests running and waiting, and the share of the KV cache in use, while there were requests: running is the
    mean step's batch or, where steps are not counted, follows from Little's law over the time between two scrapes.
    Nothing where requests are there now, or where the page does not tell."""
    if values.get("running") or values.get("waiting"):
        return {}
    served = _served_s(values)
    running = scrapes.batch if scrapes.batch is not None else values.get("requests_per_s", 0.0) * served
    if not running:
        return {}
    means = {"running": running, "unanswered": 0.0}
    if served and "queue_s" in values:
        means["waiting"] = running * values["queue_s"] / served
    if capacity := values.get("kv_capacity_tokens"):
        own = values.get("tokens_in", 0.0) * (1 - values.get("prefix_hit_fraction", 0.0))
        tokens = own + values.get("tokens_out", 0.0) / 2  # per request on average: half of its output
        means["kv_used_fraction"] = min(1.0, running * tokens / capacity)
    return means


def _served_s(values: Mapping[str, float]) -> float:
    """A request's time in the batch."""
    if "decode_s" in values:
        return values.get("prefill_s", 0.0) + values["decode_s"]
    return max(0.0, values.get("e2e_s", 0.0) - values.get("queue_s", 0.0))
