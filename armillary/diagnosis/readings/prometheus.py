"""A Prometheus metrics page: samples by name, and histograms that give means and percentiles.

prometheus_client parses each line by itself, so that a broken line costs only itself and counters keep their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, log, nan

from armillary.errors import missing

_GROUP = 0.2
"""share of all values that makes the lower group one: fewer are the steps before and after the others"""


@dataclass(frozen=True)
class Sample:
    """One line of a page."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Cell:
    """One bucket of a histogram."""

    low: float
    high: float
    count: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Histogram:
    """Counts by rising upper bounds, of which the last is infinite; each count has all below it."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count > 0 else None

    def quantile(self, share: float) -> float | None:
        """Interpolated within its bucket, as Prometheus does; in the last one: the highest finite bound."""
        if self.count <= 0:
            return None
        rank, low, below = share * self.count, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > below:
                return low if bound == inf else low + (bound - low) * (rank - below) / (count - below)
            low, below = (bound if isfinite(bound) else low), count
        return low

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Its buckets that hold anything, from the lowest; the last has no upper end and counts as its lower one."""
        lows, belows = (0.0, *self.bounds), (0.0, *self.counts)
        buckets = zip(lows, self.bounds, self.counts, belows, strict=False)
        return tuple(
            Cell(low, high if isfinite(high) else low, count - below)
            for low, high, count, below in buckets
            if count > below
        )

    def lower_group(self, apart: float) -> float | None:
        """Mean of the lower group, where values fall into two whose middles are `apart` times apart; else None.

        The split is Otsu's (1979): the variance between the groups, of logarithms, is largest. The sum is known
        exactly, so the upper group by its buckets' middles leaves the lower, as far as its own buckets allow.
        """
        cells = self.cells
        split = max(range(1, len(cells)), key=lambda at: _between(cells[:at], cells[at:]), default=0)
        lower, upper = cells[:split], cells[split:]
        count = sum(cell.count for cell in lower)
        if count < _GROUP * self.count or not lower or _log_mean(upper) - _log_mean(lower) < log(apart):
            return None
        least, most = (
            sum(end * cell.count for cell, end in ends) / count
            for ends in ([(cell, cell.low) for cell in lower], [(cell, cell.high) for cell in lower])
        )
        left = (self.sum - sum(cell.middle * cell.count for cell in upper)) / count
        return min(most, max(least, left))

    def since(self, earlier: Histogram) -> Histogram:
        """What was added after `earlier`."""
        counts = tuple(now - before for now, before in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum - earlier.sum)


@dataclass(frozen=True)
class Page:
    """The samples of one page, by name; a name may choose by a label: metric{label=value}."""

    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return bool(self._chosen(name))

    def _chosen(self, name: str) -> tuple[Sample, ...]:
        metric, _, chosen = name.removesuffix("}").partition("{")
        label, _, value = chosen.partition("=")
        samples = self.samples.get(metric, ())
        return tuple(sample for sample in samples if sample.labels.get(label) == value) if chosen else samples

    def find(self, name: str) -> tuple[Sample, ...]:
        """Of one part only where several ranks of a model say the same: the first tensor- and pipeline-parallel one."""
        return tuple(sample for sample in self._chosen(name) if _speaks(sample.labels))

    def total(self, name: str) -> float | None:
        samples = self.find(name)
        return sum(sample.value for sample in samples) if samples else None

    def mean(self, name: str) -> float | None:
        samples = self.find(name)
        return sum(sample.value for sample in samples) / len(samples) if samples else None

    def labels(self, name: str) -> dict[str, str]:
        """Of the first sample: what info metrics tell."""
        return dict(next((sample.labels for sample in self.find(name)), {}))

    def histogram(self, name: str) -> Histogram | None:
        """All its series together; a summary or a lone sum and count has a mean and no percentiles."""
        counts: dict[float, float] = {}
        for sample in self.find(f"{name}_bucket"):
            bound = number_of(sample.labels.get("le", ""))
            if bound is not None:
                counts[bound] = counts.get(bound, 0.0) + sample.value
        total, count = self.total(f"{name}_sum"), self.total(f"{name}_count")
        if total is None or (count is None and not counts):
            return None
        counts.setdefault(inf, count if count is not None else max(counts.values()))
        bounds = tuple(sorted(counts))
        return Histogram(bounds, tuple(counts[bound] for bound in bounds), total)


def parse_page(text: str) -> Page:
    """Lines that are not samples (comments, torn lines, NaN) are passed over."""
    by_name: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        for name, labels, value in () if line.startswith("#") else _parse_line(line):
            if not isnan(value):
                by_name.setdefault(name, []).append(Sample(labels, value))
    return Page({name: tuple(samples) for name, samples in by_name.items()})


def _parse_line(line: str) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of a line; none where it is broken. An exemplar behind the value is left out."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise missing("prometheus_client", "reading a metrics page", "http") from None
    for text in (line, line.rpartition(" # ")[0]):
        try:
            families = list(text_string_to_metric_families(text))
        except (ValueError, IndexError):
            continue
        return [(sample.name, sample.labels, float(sample.value)) for family in families for sample in family.samples]
    return []


def _log_mean(cells: Sequence[Cell]) -> float:
    count = sum(cell.count for cell in cells)
    return sum(cell.count * log(max(cell.middle, 1e-12)) for cell in cells) / count


def _between(lower: Sequence[Cell], upper: Sequence[Cell]) -> float:
    """Variance between two groups, up to a constant."""
    weights = sum(cell.count for cell in lower) * sum(cell.count for cell in upper)
    return weights * (_log_mean(upper) - _log_mean(lower)) ** 2


def number_of(text: str | None) -> float | None:
    """None where it is no number, or none at all."""
    try:
        value = float(text) if text is not None else nan
    except ValueError:
        return None
    return None if isnan(value) else value


def _speaks(labels: Mapping[str, str]) -> bool:
    return labels.get("tp_rank", "0") == "0" and labels.get("pp_rank", "0") == "0"
