"""What a device reaches in each dtype, for the rule that resolves `"auto"`: ceilings measured on it, or a short probe.

Stored ceilings of this very device come first. Without them a CPU or an unknown GPU is probed once (a fraction of a
second; the result is stored with the ceilings), a chip of the catalogue is taken at its published peaks, and without
torch a CPU is judged by its feature flags alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import log
from typing import TYPE_CHECKING

from armillary.errors import BadInput
from armillary.spec.hardware import Chip, Cluster
from armillary.spec.model import ModelConfig
from armillary.spec.precision import EMULATED, SIXTEEN_BIT, UNITS_UNUSED, WIDE, DtypeRate, DtypeRates
from armillary.store.home import Home

if TYPE_CHECKING:  # a plan for a chip of the catalogue needs neither the machine nor the store's locks and sockets
    from armillary.store.peaks import Peaks, Point

DTYPES: tuple[str, ...] = (WIDE, *SIXTEEN_BIT)
PROBE = "probe"
"""kind of the points that a probe leaves in peaks/DEVICE.json: too short a measurement for ceilings"""
FEW_ROWS = 16
"""rows up to which a GEMM is bound by reading its weights: a decode step"""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The sizes of a run that rates depend on; `rows` are the tokens of a forward pass, `keys` those per query."""

    rows: int
    hidden: int
    ffn: int
    keys: int
    head_dim: int


def run_shape(config: ModelConfig, *, rows: int, keys: int) -> RunShape:
    """The shape of a model's run with `rows` tokens per forward pass and `keys` per sequence."""
    ffn = config.ffn or (config.moe.ffn if config.moe else 0) or 4 * config.hidden
    return RunShape(rows=max(1, rows), hidden=config.hidden, ffn=ffn, keys=max(1, keys), head_dim=config.head_dim)


def cluster_rates(home: Home, cluster: Cluster, shape: RunShape, *, device: str | None = None) -> DtypeRates:
    """Rates of a cluster's chip: as measured or probed here where it is this machine, else the catalogue's."""
    if cluster.name != "here":
        return catalogue_rates(cluster.chip)
    if cluster.chip.kind == "cpu" or device == "cpu":
        return cpu_rates(home, shape)
    from armillary.machine.gpus import gpus

    name = next((gpu.name for gpu in gpus()), "")
    return gpu_rates(home, cluster.chip, name, shape, device or "cuda")


def device_rates(home: Home, device: str, shape: RunShape) -> DtypeRates:
    """Rates of a device of this machine, as torch names it: cpu, cuda, cuda:1."""
    if device.startswith("cpu"):
        return cpu_rates(home, shape)
    from armillary.machine.device_name import device_name
    from armillary.machine.gpus import Gpu
    from armillary.machine.machine import chip_of

    name = device_name(device)
    return gpu_rates(home, chip_of(Gpu(name=name, vendor="")), name, shape, device)


def cpu_rates(home: Home, shape: RunShape) -> DtypeRates:
    """Rates of this machine's CPU: measured, else probed, else by its feature flags."""
    from armillary.machine.device_name import device_name

    measured = _measured(home, device_name("cpu"), shape) or _probed(home, "cpu", shape)
    return flag_rates() if measured is None else _with_units(measured)


def _with_units(rates: DtypeRates) -> DtypeRates:
    """A dtype that the CPU has units for is not emulated: it was slow, or measured beside other work."""
    from armillary.machine.features import has_native

    least = UNITS_UNUSED * rates.by_dtype[WIDE].gemm

    def corrected(name: str, rate: DtypeRate) -> DtypeRate:
        return replace(rate, emulated=rate.emulated and not (has_native(name) and rate.gemm >= least))

    return replace(rates, by_dtype={name: corrected(name, rate) for name, rate in rates.by_dtype.items()})


def gpu_rates(home: Home, chip: Chip, name: str, shape: RunShape, device: str) -> DtypeRates:
    """Rates of a GPU of this machine, `name` as its driver has it: measured, else the catalogue's, else probed."""
    rates = _measured(home, name, shape) or (catalogue_rates(chip) if chip.flops else _probed(home, device, shape))
    return rates or DtypeRates(by_dtype={WIDE: DtypeRate(gemm=1.0), "fp16": DtypeRate(gemm=2.0)}, source="every GPU")


def _measured(home: Home, name: str, shape: RunShape) -> DtypeRates | None:
    from armillary.store.peaks import load_peaks

    known = load_peaks(home, name) if name else None
    return measured_rates(known, shape) if known is not None else None


def _probed(home: Home, device: str, shape: RunShape) -> DtypeRates | None:
    """A probe now, stored for the next time; None without torch."""
    if find_spec("torch") is None:
        return None
    from armillary.profiling.dtypes.probe import probe
    from armillary.store.peaks import save_peaks

    try:
        probed = probe(device, shape)
    except (RuntimeError, AssertionError) as error:  # torch's own, of a GPU whose driver does not do
        raise BadInput(
            f"{device} cannot be used ({str(error).splitlines()[0]}); take --device cpu, or see armillary doctor"
        ) from None
    return probe_rates(save_peaks(home, probed).points[PROBE])


# --- where rates come from


def measured_rates(peaks: Peaks, shape: RunShape) -> DtypeRates | None:
    """From ceilings at the nearest shapes that were measured, else from an earlier probe; None unless fp32 and a 16-bit
    dtype were both measured."""
    gemms = peaks.points.get("gemm", ())
    large, few = ([point for point in gemms if (point["m"] <= FEW_ROWS) is small] for small in (False, True))
    by_dtype = {dtype: rate for dtype in DTYPES if (rate := _rate_of(dtype, shape, large, few, peaks)) is not None}
    if WIDE in by_dtype and any(half in by_dtype for half in SIXTEEN_BIT):
        return DtypeRates(by_dtype=_marked(by_dtype), source=f"measured {peaks.date}")
    return probe_rates(peaks.points.get(PROBE, ()))


def _rate_of(
    dtype: str, shape: RunShape, large: Iterable[Point], few: Iterable[Point], peaks: Peaks
) -> DtypeRate | None:
    sizes = {"m": shape.rows, "n": shape.ffn, "k": shape.hidden}
    gemm = _nearest(large, dtype, sizes)
    if gemm is None:
        return None
    decode = _nearest(few, dtype, {"m": 1, "n": shape.ffn, "k": shape.hidden})
    forward = [point for point in peaks.points.get("attention", ()) if not point["backward"]]
    attention = _nearest(forward, dtype, {"keys": shape.keys, "head_dim": shape.head_dim})
    return DtypeRate(
        gemm=float(gemm["flops"]),
        emulated=bool(gemm.get("beside", {}).get("emulated")),
        decode=float(decode["flops"]) if decode else None,
        attention=float(attention["flops"]) if attention else None,
    )


def _nearest(points: Iterable[Point], dtype: str, sizes: Mapping[str, int]) -> Point | None:
    """The point of a dtype whose sizes are nearest by factors."""
    of_dtype = [point for point in points if point["dtype"] == dtype]
    return min(
        of_dtype, key=lambda point: sum(abs(log(point[name] / size)) for name, size in sizes.items()), default=None
    )


def probe_rates(points: Iterable[Point]) -> DtypeRates | None:
    rows = {str(point["dtype"]): point for point in points}
    if WIDE not in rows:
        return None
    by_dtype = {
        dtype: DtypeRate(
            gemm=float(row["flops"]),
            attention=row.get("attention"),
            decode=row.get("decode"),
            emulated=bool(row.get("emulated")),
        )
        for dtype, row in rows.items()
    }
    return DtypeRates(by_dtype=_marked(by_dtype), source="a short probe")


def catalogue_rates(chip: Chip) -> DtypeRates:
    """Published dense peaks; attention is assumed to gain as GEMM does, decoding by the bytes per weight."""
    wide = chip.flops.get(WIDE) or min(chip.flops.values(), default=1.0)
    by_dtype = {
        dtype: DtypeRate(gemm=flops, decode=2 * wide) for dtype in DTYPES[1:] if (flops := chip.flops.get(dtype))
    }
    return DtypeRates(by_dtype={WIDE: DtypeRate(gemm=wide, decode=wide), **by_dtype}, source="the catalogue's peaks")


def flag_rates() -> DtypeRates:
    """By the CPU's feature flags: a dtype without units is emulated, one with units twice as fast as fp32."""
    from armillary.machine.features import has_native

    by_dtype = {
        dtype: DtypeRate(gemm=2.0 if native else 0.1, emulated=not native)
        for dtype in DTYPES[1:]
        if (native := has_native(dtype)) is not None
    }
    return DtypeRates(by_dtype={WIDE: DtypeRate(gemm=1.0), **by_dtype}, source="the CPU's feature flags")


def _marked(rates: Mapping[str, DtypeRate]) -> dict[str, DtypeRate]:
    """Emulated where marked, or where a narrower dtype is far slower than fp32."""
    wide = rates[WIDE].gemm
    return {
        name: replace(rate, emulated=rate.emulated or (name != WIDE and rate.gemm < EMULATED * wide))
        for name, rate in rates.items()
    }
