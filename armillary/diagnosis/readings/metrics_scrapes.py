"""Scrapes: one metrics page of a server, or two some seconds apart, by the gauge names of `spec/gauges.py`.

Where enough happened between two scrapes, their difference is used rather than the totals since the server started.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from armillary.diagnosis.readings.prometheus import Histogram, Page
from armillary.diagnosis.readings.server_metrics import Server
from armillary.spec.gauges import GAUGES

_ENOUGH = 30
"""values that a distribution must gain between two scrapes before its percentiles are taken from these alone"""
_PERCENTILES = (50, 90, 99)
_APART = 3.0
"""ratio of inter-token latencies with and without prefill from which the two kinds are told apart"""
_RATES = {
    "requests_total": "requests_per_s",
    "tokens_in_total": "tokens_in_per_s",
    "tokens_out_total": "tokens_out_per_s",
}


@dataclass(frozen=True, kw_only=True)
class Scrapes:
    """A server's page now and, where it was scraped before, then."""

    server: Server
    now: Page
    before: Page | None = None  # None where the server restarted in between
    seconds: float = 0.0  # between the two pages

    def figures(self) -> dict[str, float]:
        """Everything the page says, by gauge."""
        totals = totals_of(self.now, self.server)
        values = self._gauges() | totals | _fractions(totals) | dict(self._distributions()) | self._of_steps()
        values |= self._durations()
        values |= self._derived(values)
        if self.before is not None:
            before = totals_of(self.before, self.server)
            gained = {name: totals[name] - then for name, then in before.items() if name in totals}
            values |= self._rates(gained) | _fractions(gained)
        return values

    def distribution(self, gauge: str) -> Histogram | None:
        """By the first name that the page knows."""
        histograms = (self.histogram(name) for name in self.server.histograms.get(gauge, ()))
        return next((histogram for histogram in histograms if histogram is not None), None)

    def histogram(self, name: str) -> Histogram | None:
        """Between two scrapes where enough happened, else since the start."""
        now, then = self.now.histogram(name), self.before.histogram(name) if self.before else None
        if now is None or then is None or now.bounds != then.bounds or now.count - then.count < _ENOUGH:
            return now
        return now.since(then)

    @property
    def steps(self) -> Histogram | None:
        """Tokens of the engine's steps."""
        histogram = self.histogram(self.server.step_tokens) if self.server.step_tokens else None
        return histogram if histogram is not None and histogram.count else None

    @property
    def batch(self) -> float | None:
        """Requests per step: each gets its first or its next token from it."""
        steps, firsts, gaps = self.steps, self.distribution("ttft_s"), self.distribution("itl_s")
        if steps is None or firsts is None or gaps is None:
            return None
        return (firsts.count + gaps.count) / steps.count

    def _gauges(self) -> dict[str, float]:
        """Counts of all engines together; shares as their mean."""
        names = {gauge: name for gauge, names in self.server.values.items() if (name := first_of(self.now, names))}
        values = {
            gauge: self.now.mean(name) if gauge.endswith("_fraction") else self.now.total(name)
            for gauge, name in names.items()
        }
        return {gauge: value for gauge, value in values.items() if value is not None}

    def _distributions(self) -> Iterator[tuple[str, float]]:
        for gauge in self.server.histograms:
            histogram = self.distribution(gauge)
            if histogram is None or histogram.mean is None:
                continue
            yield gauge, histogram.mean
            for percent in _PERCENTILES:
                name = f"{gauge.removesuffix('_s')}_p{percent}_s"
                value = histogram.quantile(percent / 100)
                if name in GAUGES and value is not None and len(histogram.bounds) > 1:
                    yield name, value

    def _durations(self) -> dict[str, float]:
        """Mean seconds per request of the model that takes the longest, which holds the others where they are parts of
        an ensemble, and how many it has answered; between two scrapes where enough happened."""
        values: dict[str, float] = {}
        for gauge, (spent, counted) in self.server.durations.items():
            now = _by_model(self.now, spent, counted)
            then = _by_model(self.before, spent, counted) if self.before is not None else {}
            means = {model: _mean_us(pair, then.get(model, (0.0, 0.0))) for model, pair in now.items() if pair[1] > 0}
            if means:
                longest = max(means, key=lambda model: means[model])
                values |= {gauge: means[longest] / 1e6, "requests_total": now[longest][1]}
        return values

    def _of_steps(self) -> dict[str, float]:
        """Decode and prefill tokens per step, and the inter-token latency of steps without prefill."""
        steps, batch = self.steps, self.batch
        if steps is None or steps.mean is None or batch is None:
            return {}
        gauges = {"decode_tokens": min(batch, steps.mean), "prefill_tokens": max(0.0, steps.mean - batch)}
        gaps = self.distribution("itl_s")
        alone = gaps.lower_group(_APART) if gaps is not None else None
        fullest = steps.quantile(0.99) if len(steps.bounds) > 1 else None
        return gauges | ({"decode_gap_s": alone} if alone else {}) | ({"full_step_tokens": fullest} if fullest else {})

    def _derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """What a page leaves out and its other figures tell: requests answered, lengths of a mean request."""
        derived: dict[str, float] = {}
        histograms = map(self.now.histogram, self.server.histograms.get("e2e_s", ()))
        requests = values.get("requests_total") or next((ended.count for ended in histograms if ended), 0.0)
        if requests and "requests_total" not in values:
            derived["requests_total"] = requests
        for total, each in (("tokens_in_total", "tokens_in"), ("tokens_out_total", "tokens_out")):
            if requests and each not in values and total in values:
                derived[each] = values[total] / requests
        if self.server.durations and values.get("tokens_out") and values.get("e2e_s"):
            inside = values.get("running", 0.0) / max(1.0, values.get("running", 0.0) + values.get("waiting", 0.0))
            derived["tpot_s"] = values["e2e_s"] * (inside or 1.0) / values["tokens_out"]  # Little's law: those inside
        return derived

    def _rates(self, gained: Mapping[str, float]) -> dict[str, float]:
        """Per second, and per request where enough of them ended."""
        rates = {
            rate: gained[total] / self.seconds for total, rate in _RATES.items() if total in gained and self.seconds > 0
        }
        requests = gained.get("requests_total", 0.0)
        if requests >= _ENOUGH and "preemptions_total" in gained:
            rates["preemptions_per_request"] = gained["preemptions_total"] / requests
        return rates


def first_of(page: Page, names: tuple[str, ...]) -> str | None:
    """The name that the page knows."""
    return next((name for name in names if name in page), None)


def _by_model(page: Page, spent: str, counted: str) -> dict[str, tuple[float, float]]:
    """(microseconds, requests) of each model."""
    counts = {sample.labels.get("model", ""): sample.value for sample in page.find(counted)}
    times = {sample.labels.get("model", ""): sample.value for sample in page.find(spent)}
    return {model: (time, counts[model]) for model, time in times.items() if model in counts}


def _mean_us(now: tuple[float, float], then: tuple[float, float]) -> float:
    """Of what came since, where that is enough."""
    spent, count = now[0] - then[0], now[1] - then[1]
    return spent / count if count >= _ENOUGH else now[0] / now[1]


def totals_of(page: Page, server: Server) -> dict[str, float]:
    """What only grows."""
    totals = {gauge: page.total(name) for gauge, names in server.totals.items() if (name := first_of(page, names))}
    return {gauge: total for gauge, total in totals.items() if total is not None}


def _fractions(totals: Mapping[str, float]) -> dict[str, float]:
    asked = totals.get("prefix_queries_total", 0.0)
    return {"prefix_hit_fraction": totals.get("prefix_hits_total", 0.0) / asked} if asked > 0 else {}
