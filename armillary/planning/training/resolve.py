"""A question to the planner: a recipe with its model and devices resolved, as a case to be priced.

What a recipe leaves out is derived here and noted, so that every verb answers the same question alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log2
from typing import TYPE_CHECKING

from armillary.errors import BadInput
from armillary.planning.device_model.frameworks import OURS, OURS_BY_LAYER, OURS_ON_CPU, Software, runs_whole
from armillary.planning.device_model.measured_peaks import measured_peaks, processor_peaks
from armillary.planning.training.train_case import Lora, TrainCase, lora_of, read_lora
from armillary.profiling.dtypes.choice import Resolved, resolve_training, with_precision
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster, Tier
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.units import count_text

if TYPE_CHECKING:  # the store's locks and sockets are slow to import
    from armillary.store.peaks import Peaks

USUAL_BATCH = 4_194_304
"""tokens of a step where nobody says: as Llama 2 and OLMo trained"""
USUAL_SEQUENCE = 4096
SNAP = 0.05
"""a batch may be moved by this share to one that divides well"""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked."""

    recipe: Recipe
    """overrides applied, auto resolved"""
    asked: Recipe
    """the same as it was given"""
    model: ModelConfig
    """its shape"""
    case: TrainCase
    """what is priced"""
    notes: tuple[str, ...] = ()
    """what was assumed"""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """recipe key that said "auto" -> what it came to and why"""

    @property
    def layout(self) -> Layout:
        return self.recipe.layout


def question(
    recipe: Recipe, model: ModelConfig, cluster: Cluster, home: Home, lora: str | None = None, *, settled: bool = False
) -> Question:
    """The recipe's training job on its cluster, with the ceilings of this device where there are any; a precision of
    auto is resolved for the device. A `settled` one is that of a run, and not questioned however slow it is here."""
    asked, job = recipe, recipe.train
    resolved = (
        Resolved(dtype=recipe.layout.precision)
        if settled and recipe.layout.precision != "auto"
        else resolve_training(recipe.layout, model, job, cluster, home)
    )
    recipe = replace(recipe, layout=with_precision(recipe.layout, resolved))
    cluster, measured, share, notes = _devices(cluster, recipe.layout, home)
    adapters = read_lora(lora, model) if lora is not None else lora_of(model, job)
    case = TrainCase(
        model=model,
        cluster=cluster,
        sequence=job.sequence,
        batch_tokens=job.batch_tokens,
        measured=measured,
        measured_share=share,
        loss_chunk=job.chunk_tokens(model.vocab),
        lora=adapters,
        software=_ours(model, cluster, adapters),
        compiled=job.compiled,
    )
    if case.lora is not None:
        notes = (*notes, f"{count_text(case.lora.parameters)} weights of adapters are trained, the model's stay frozen")
    notes = (*notes, resolved.warning) if resolved.warning else notes
    chosen = {"layout.precision": resolved.reason} if resolved.reason else {}
    return Question(recipe=recipe, asked=asked, model=model, case=case, notes=notes, chosen=chosen)


def _ours(model: ModelConfig, cluster: Cluster, adapters: Lora | None) -> Software:
    """On a GPU blocks are passes of their own where they are whole: one device, no adapters, a shape they know.
    Asked of the cluster, because a search has no layout yet."""
    if cluster.chip.kind == "cpu":
        return OURS_ON_CPU
    whole = adapters is None and cluster.num_devices == 1 and runs_whole(model)
    return OURS if whole else OURS_BY_LAYER


def _devices(cluster: Cluster, layout: Layout, home: Home) -> tuple[Cluster, Peaks | None, float, tuple[str, ...]]:
    if cluster.chip.kind == "cpu" and cluster.name == "here":
        return _processor(cluster, layout.num_devices, home)
    measured = measured_peaks(home, cluster.chip)
    unknown = [tier.link.title for tier in cluster.tiers if tier.link.bytes_per_s is None]
    notes = tuple(f"the speed of {title} is not known: armillary bench collectives measures it" for title in unknown)
    return cluster, measured, 1.0, notes


def _processor(cluster: Cluster, processes: int, home: Home) -> tuple[Cluster, Peaks | None, float, tuple[str, ...]]:
    """A processor's cores work together for one process; several processes share them evenly."""
    cores, chip = cluster.num_devices, cluster.chip
    measured, share = processor_peaks(home, chip, cores, processes)
    notes: tuple[str, ...] = ()
    if measured is None:
        chip = _like_the_catalogue(chip, cores)
        notes = ("this processor was not measured: the catalogue's stands in; armillary bench ceilings measures it",)
    memory = (cluster.chip.memory_bytes or 0.0) * cores / max(processes, 1)
    scaled = {dtype: flops / max(processes, 1) for dtype, flops in chip.flops.items()}
    bandwidth = chip.memory_bytes_per_s / max(processes, 1) if chip.memory_bytes_per_s else None
    part = replace(
        chip,
        memory_bytes=memory,
        flops=scaled,
        memory_bytes_per_s=bandwidth,
        title=_share_title(cluster.chip.title, cores / max(processes, 1)),
    )
    link = cluster.tiers[0].link if cluster.tiers else catalogue.link("pcie4-x16")
    tiers = (Tier(link=link, count=processes),) if processes > 1 else ()
    return Cluster(name="here", chip=part, tiers=tiers), measured, share, notes


def _share_title(core: str, cores: float) -> str:
    """'2 × core of …': what one process has; half a core where processes are more than cores."""
    return core if cores == 1 else f"{cores:.3g} × {core}"


def _like_the_catalogue(chip: Chip, cores: int) -> Chip:
    """The catalogue's server processor, as many cores of it."""
    known = catalogue.chip("cpu")
    share = cores / (known.num_sms or cores)
    bandwidth = known.memory_bytes_per_s * min(1.0, share) if known.memory_bytes_per_s else None
    return replace(
        chip,
        flops={dtype: flops * share for dtype, flops in known.flops.items()},
        memory_bytes_per_s=bandwidth,
        num_sms=1,
    )


# --- what nobody said


def usual_sequence(model: ModelConfig) -> int:
    return min(model.context, USUAL_SEQUENCE)


def dividing_batch(wanted: int | None, sequence: int, devices: int) -> tuple[int, str]:
    """(tokens of a step, what to note): `wanted`, or as many sequences near it as divide well over axes of two; where
    nobody says, near the usual batch and a multiple of all devices."""
    if wanted is None:
        times = 2 ** max(0, round(log2(max(USUAL_BATCH / sequence / devices, 1.0))))
        batch = sequence * devices * times
        return batch, f"a batch of {batch:,} tokens was assumed; --batch-tokens says otherwise"
    if wanted < sequence:
        raise BadInput(
            f"a batch of {wanted} tokens is less than one sequence of {sequence}; try --batch-tokens {sequence}"
        )
    near = _dividing(wanted / sequence)
    batch = near * sequence
    return batch, "" if batch == wanted else f"the batch was taken as {near:,} sequences = {batch:,} tokens"


def _dividing(target: float) -> int:
    """The sequences within SNAP of `target` that a power of two as high as possible divides, the nearest of them."""
    low, high = max(1, round(target * (1 - SNAP))), max(1, round(target * (1 + SNAP)))
    power = 2 ** int(log2(high))
    while high // power * power < low:
        power //= 2
    return min(range(-(-low // power) * power, high + 1, power), key=lambda n: abs(n - target))
