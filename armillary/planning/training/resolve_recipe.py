"""Resolve a recipe for planning: its model, devices and "auto" settings, as a case to price.

Defaults for what a recipe leaves out are derived here and noted, so that every verb plans the same problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import TYPE_CHECKING

from armillary.errors import BadInput
from armillary.machine.cores import BUSY_CORES
from armillary.planning.device_model.correction import load_correction
from armillary.planning.device_model.frameworks import OURS, OURS_BY_LAYER, OURS_ON_CPU, Software, has_fused_block
from armillary.planning.device_model.measured_peaks import cpu_peaks, measured_peaks, with_measured_links
from armillary.planning.device_model.recorded_peaks import recorded_peaks
from armillary.planning.training.train_case import Lora, TrainCase, lora_of, read_lora
from armillary.profiling.dtypes.choice import Resolved, resolve_training
from armillary.profiling.dtypes.rates import PROBE
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster, Tier
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:  # the store's locks and sockets are slow to import
    from armillary.store.peaks import Peaks

USUAL_BATCH = 4_194_304
"""default tokens per step: as Llama 2 and OLMo were trained"""
USUAL_SEQUENCE = 4096
SNAP = 0.05
"""share by which a batch may be moved to one that divides well"""


@dataclass(frozen=True, kw_only=True)
class TrainingProblem:
    """A training recipe with everything resolved that planning needs."""

    recipe: Recipe
    requested: Recipe
    """the recipe before auto was resolved"""
    model: ModelConfig
    case: TrainCase
    notes: tuple[str, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    """recipe key that was "auto" -> its value and the reason"""

    @property
    def layout(self) -> Layout:
        return self.recipe.layout


def resolve(
    recipe: Recipe,
    model: ModelConfig,
    cluster: Cluster,
    home: Home,
    lora: str | None = None,
    *,
    is_run: bool = False,
    is_corrected: bool = True,
) -> TrainingProblem:
    """The recipe's training job on its cluster, with the measured ceilings of this device and the corrections by its
    runs, if any. A precision of auto is resolved for the device; that of an existing run (`is_run`) is not checked
    against what is fast here."""
    requested, job = recipe, recipe.train
    resolved = (
        Resolved(dtype=recipe.layout.precision)
        if is_run and recipe.layout.precision != "auto"
        else resolve_training(recipe.layout, model, job, cluster, home)
    )
    recipe = replace(recipe, layout=replace(recipe.layout, precision=resolved.dtype))
    cluster, measured, share, notes = _devices(with_measured_links(home, cluster), recipe.layout, home)
    recorded = recorded_peaks(cluster.chip) if measured is None else None
    notes = (*notes, *_measured_links(cluster.tiers), *_recorded(cluster.chip, recorded), *_disturbed(measured))
    adapters = read_lora(lora, model) if lora is not None else lora_of(model, job)
    correction = load_correction(home, cluster.chip.name) if is_corrected else None
    if correction is not None:
        notes = (*notes, correction.note)
    case = TrainCase(
        model=model,
        cluster=cluster,
        sequence=job.sequence,
        batch_tokens=job.batch_tokens,
        measured=measured,
        measured_share=share,
        recorded=recorded,
        loss_chunk=job.chunk_tokens(model.vocab),
        lora=adapters,
        software=_software(model, cluster, adapters),
        compiled=job.compiled,
        correction=correction,
    )
    if case.lora is not None:
        notes = (*notes, f"{count_text(case.lora.parameters)} weights of adapters are trained, the model's are frozen")
    notes = (*notes, resolved.warning) if resolved.warning else notes
    chosen = {"layout.precision": resolved.reason} if resolved.reason else {}
    return TrainingProblem(recipe=recipe, requested=requested, model=model, case=case, notes=notes, chosen=chosen)


def _software(model: ModelConfig, cluster: Cluster, adapters: Lora | None) -> Software:
    """On a GPU blocks are fused where nothing shards or adapts them: one device, no adapters, a supported shape. The
    cluster decides, because a search has no layout yet."""
    if cluster.chip.kind == "cpu":
        return OURS_ON_CPU
    fused = adapters is None and cluster.num_devices == 1 and has_fused_block(model)
    return OURS if fused else OURS_BY_LAYER


def _devices(cluster: Cluster, layout: Layout, home: Home) -> tuple[Cluster, Peaks | None, float, tuple[str, ...]]:
    if cluster.chip.kind == "cpu" and cluster.name == "here":
        return _cpu(cluster, layout.num_devices, home)
    measured = measured_peaks(home, cluster.chip)
    return cluster, measured, 1.0, _unknown_links(cluster.tiers)


def _unknown_links(tiers: Sequence[Tier]) -> tuple[str, ...]:
    """A note for each link whose speed is neither in the catalogue nor measured."""
    unknown = [tier.link for tier in tiers if tier.link.bytes_per_s is None]
    return tuple(f"the speed of {link.title} is unknown: {_REMEDY[link.kind == 'scale_out']}" for link in unknown)


def _recorded(chip: Chip, recorded: Peaks | None) -> tuple[str, ...]:
    """A note where ceilings are those of another device of this kind."""
    if recorded is None:
        return ()
    title = f"no {chip.title} was measured here: its ceilings are those that another one reached on {recorded.date}"
    return (f"{title}; armillary bench ceilings measures yours",)


def _disturbed(measured: Peaks | None) -> tuple[str, ...]:
    """A note where other work ran while the ceilings of a CPU were measured."""
    busy = float(measured.about.get("other_cores") or 0.0) if measured is not None else 0.0
    if measured is None or busy <= BUSY_CORES:
        return ()
    return (
        f"other work kept {busy:.1f} cores busy when this machine was measured ({measured.date}): real steps are "
        "likely faster; armillary bench ceilings measures again",
    )


def _measured_links(tiers: Sequence[Tier]) -> tuple[str, ...]:
    """A note for each link that was measured on these nodes."""
    return tuple(
        f"{link.title}: {bytes_text(link.bytes_per_s or 0)}/s and {seconds_text(link.latency_s or 0)} per step of a "
        f"ring, as measured ({link.source})"
        for link in (tier.link for tier in tiers)
        if link.is_measured
    )


EMULATED = 0.2
"""rate of a GEMM in a dtype without units over that in fp32 (two Skylake cores with AVX-512, bf16, docs/dtypes.md)"""
_REMEDY = {False: "armillary bench collectives measures it", True: "armillary launch --check measures it"}


def _cpu(cluster: Cluster, processes: int, home: Home) -> tuple[Cluster, Peaks | None, float, tuple[str, ...]]:
    """All cores of a CPU work for one process; several processes share them evenly, on each of the nodes."""
    nodes, chip = cluster.num_nodes, cluster.chip
    cores, processes = cluster.num_devices // nodes, -(-processes // nodes)
    measured, share = cpu_peaks(home, chip, cores, processes)
    notes: tuple[str, ...] = ()
    if measured is None:
        chip = _catalogue_cpu(chip, cores, home)
        notes = ("this CPU was not measured: the catalogue's figures are used; armillary bench ceilings measures it",)
    ranks = max(processes, 1)
    own, title = cores / ranks, cluster.chip.title  # less than a core where there are more processes than cores
    part = replace(
        chip,
        memory_bytes=(cluster.chip.memory_bytes or 0.0) * cores / ranks,
        flops={dtype: flops / ranks for dtype, flops in chip.flops.items()},
        memory_bytes_per_s=chip.memory_bytes_per_s / ranks if chip.memory_bytes_per_s else None,
        title=title if own == 1 else f"{own:.3g} × {title}",
    )
    network = tuple(tier for tier in cluster.tiers if tier.link.kind == "scale_out")
    inner = [tier.link for tier in cluster.tiers if tier.link.kind != "scale_out"]
    link = inner[0] if inner else catalogue.link("pcie4-x16")
    tiers = (Tier(link=link, count=processes),) if processes > 1 else ()
    return (
        Cluster(name="here", chip=part, tiers=(*tiers, *network)),
        measured,
        share,
        (*notes, *_unknown_links(network)),
    )


def _catalogue_cpu(chip: Chip, cores: int, home: Home) -> Chip:
    """The catalogue's server CPU with this number of cores; a dtype that this CPU emulates is as fast as a probe found,
    and slower than fp32 where there was none."""
    from armillary.machine.features import has_native

    known = catalogue.chip("cpu")
    share, probed = cores / (known.num_sms or cores), _probed(home)
    emulated = {
        dtype: probed.get(dtype, EMULATED) * known.flops["fp32"] for dtype in known.flops if has_native(dtype) is False
    }
    return replace(
        chip,
        flops={dtype: flops * share for dtype, flops in {**known.flops, **emulated}.items()},
        memory_bytes_per_s=known.memory_bytes_per_s * min(1.0, share) if known.memory_bytes_per_s else None,
        num_sms=1,
    )


def _probed(home: Home) -> dict[str, float]:
    """dtype -> rate of a GEMM over that in fp32, by the probe of this CPU."""
    if not home.peaks.is_dir():
        return {}
    from armillary.machine.device_name import device_name
    from armillary.store.peaks import load_peaks

    peaks = load_peaks(home, device_name("cpu"))
    rates = {str(point["dtype"]): float(point["flops"]) for point in (peaks.points.get(PROBE, ()) if peaks else ())}
    return {dtype: rate / rates["fp32"] for dtype, rate in rates.items() if rates.get("fp32")}


# --- defaults


def usual_sequence(model: ModelConfig) -> int:
    return min(model.context, USUAL_SEQUENCE)


def dividing_batch(wanted: int | None, sequence: int, devices: int) -> tuple[int, str]:
    """(tokens per step, note): `wanted`, or a number of sequences near it that divides well over axes of powers of two;
    by default near the usual batch and a multiple of all devices."""
    if wanted is None:
        batch = sequence * devices * 2 ** max(0, round(log2(max(USUAL_BATCH / sequence / devices, 1.0))))
        return batch, f"a batch of {batch:,} tokens was assumed; --batch-tokens sets another"
    if wanted < sequence:
        raise BadInput(
            f"a batch of {wanted} tokens is less than one sequence of {sequence}; try --batch-tokens {sequence}"
        )
    near = _dividing(wanted / sequence)
    batch = near * sequence
    return batch, "" if batch == wanted else f"the batch was taken as {near:,} sequences = {batch:,} tokens"


def _dividing(target: float) -> int:
    """The number of sequences within SNAP of `target` that the highest power of two divides, the nearest of them."""

    low, high = max(1, round(target * (1 - SNAP))), max(1, round(target * (1 + SNAP)))
    power = 2 ** int(log2(high))
    while high // power * power < low:
        power //= 2
    return min(range(-(-low // power) * power, high + 1, power), key=lambda n: abs(n - target))
