"""The price of a change of the recipe: what it would make of a measured step, part by part.

The planner says how each part changes (predicted after over predicted before); the measurement says how long each part
is. Operations too short for any roofline follow the number of launches rather than the work in them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from armillary.diagnosis.evidence.finding import overrides_of
from armillary.diagnosis.evidence.step_parts import (
    Parts,
    launch_overhead_share,
    micro_batch_overhead_share,
    parts_of,
    recompute_share,
)
from armillary.diagnosis.evidence.thresholds import FILLABLE_MEMORY_SHARE
from armillary.diagnosis.readings.reading import Reading
from armillary.errors import ArmillaryError
from armillary.planning.device_model.vectorised_layouts import Layouts, as_arrays
from armillary.planning.training.layout_prediction import Prediction, predict
from armillary.planning.training.resolve_recipe import resolve
from armillary.spec.layout_rules.rules import check_layout
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.units import bytes_text


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A change with what it would make of the run."""

    change: Mapping[str, Any]  # key of the recipe -> value
    speedup: float  # a step's cost to the run now over then
    memory_bytes: float  # more (or less) memory on the fullest device

    @property
    def risk(self) -> str:
        """What it takes of memory, where that is worth saying."""
        if abs(self.memory_bytes) < 1e7:
            return "none"
        return f"{'+' if self.memory_bytes > 0 else '−'} {bytes_text(abs(self.memory_bytes))}"


class Pricing:
    """Of one reading with a plan for training: `price(change)`."""

    def __init__(self, reading: Reading, home: Home) -> None:
        assert reading.plan is not None and reading.plan.train is not None, "a plan for training"
        self.reading, self.plan, self.job, self.home = reading, reading.plan, reading.plan.train, home
        self.parts = parts_of(reading)
        requested = recipe_from_dict(self.plan.recipe)
        self.recipe = replace(requested, layout=self.plan.layout, train=self.job)  # as it ran: auto is resolved

    @cached_property
    def now(self) -> Prediction:
        return self._predict(self.recipe)

    def price(self, change: Mapping[str, Any]) -> Priced | None:
        """None where the change is not valid, does not fit, or nothing was measured to apply it to."""
        then = self._then(change)
        more = self._more_memory(then) if then is not None else None
        if then is None or more is None or self.parts is None:
            return None
        changed = self._changed(self.parts, then)
        return Priced(change=change, speedup=self.parts.total / changed.total, memory_bytes=more)

    def price_parts(self, change: Mapping[str, Any], **seconds: float) -> Priced | None:
        """A change that only alters parts which were measured, given as they would be."""
        if self.parts is None:
            return None
        changed = replace(self.parts, **seconds)
        if "step" not in seconds:
            waits = ("data_wait", "comm_exposed", "bubble")
            saved = sum(getattr(self.parts, name) - getattr(changed, name) for name in waits)
            changed = replace(changed, step=max(1e-9, self.parts.step - saved))
        return Priced(change=change, speedup=self.parts.total / changed.total, memory_bytes=0.0)

    def fused(self, change: Mapping[str, Any]) -> Priced | None:
        """A change that only fuses memory-bound ops on a CPU: these scale by their predicted time, calls by the
        predicted time of calls; GEMMs and everything else stay."""
        then, fusible = self._then(change), self.reading.get("fusible_fraction")
        if then is None or self.parts is None or fusible is None:
            return None
        saved = fusible * (1 - _of(then, "memory") / _of(self.now, "memory"))
        saved += (self.fixed or 0.0) * (1 - _of(then, "launch") / _of(self.now, "launch"))
        return self.price_parts(change, step=self.parts.step - self.parts.work * saved)

    def without_offload(self, change: Mapping[str, Any]) -> Priced | None:
        """A change that ends offloading: the measured stall goes, the optimizer's time on the device is added; by the
        planner alone where nothing was measured."""
        priced, spent, then = self.price(change), self.reading.get("offload_s"), self._then(change)
        if priced is None or spent is None or then is None or self.parts is None:
            return priced
        updating = max(0.0, _of(then, "optimizer") - _of(self.now, "optimizer"))
        measured = self.price_parts(change, step=max(0.1 * self.parts.step, self.parts.step - spent + updating))
        return measured and replace(measured, memory_bytes=priced.memory_bytes)

    @property
    def peak_bytes(self) -> float:
        """Memory in use at the fullest moment, as predicted."""
        return float(self.now.memory.total[0])

    @property
    def may_compile(self) -> bool:
        """Whether blocks run eagerly, operator by operator, and are not compiled yet."""
        return not self.job.compiled and self.now.case.software.eager_layers

    # --- the planner

    def _predict(self, recipe: Recipe) -> Prediction:
        problem = resolve(recipe, self.plan.model, self.plan.cluster, self.home)
        return predict(problem.case, as_arrays([problem.layout]))

    def _then(self, change: Mapping[str, Any]) -> Prediction | None:
        """The changed recipe as predicted; None where it is refused."""
        try:
            recipe = recipe_from_dict(self.plan.recipe, overrides_of(change))
            check_layout(
                recipe.layout,
                self.plan.model,
                num_devices=max(self.plan.cluster.num_devices, self.plan.layout.num_devices),
                sequence=recipe.train.sequence,
                batch_tokens=recipe.train.batch_tokens,
                by_trainer=True,
            )
            return self._predict(recipe)
        except ArmillaryError:
            return None

    def _more_memory(self, then: Prediction) -> float | None:
        """Bytes beyond the present peak; None where they do not fit. A measured peak above the prediction scales
        both."""
        before, after = float(self.now.memory.total[0]), float(then.memory.total[0])
        measured = self.reading.get("memory_peak_bytes") or 0.0
        factor = max(1.0, measured / before) if before and self.plan.cluster.chip.kind != "cpu" else 1.0
        fits = after * factor <= FILLABLE_MEMORY_SHARE * then.memory_limit and bool(then.fits[0])
        return after - before if fits or after <= before else None

    # --- a measured step, changed as predicted

    def _changed(self, parts: Parts, then: Prediction) -> Parts:
        now, work = self.now, self._worked(parts, then)
        exposed = _carried(parts.comm_exposed, now.time.exposed[0], then.time.exposed[0])
        idle = _carried(parts.bubble, now.time.bubble[0], then.time.bubble[0])
        busy = work + exposed + idle
        wait = max(0.0, parts.step - busy) if parts.data_wait > 0.02 * parts.step else parts.data_wait
        return replace(parts, step=busy + wait, data_wait=wait, comm_exposed=exposed, bubble=idle)

    def _worked(self, parts: Parts, then: Prediction) -> float:
        """Seconds that are neither waiting nor idle. Where only the rows per micro-batch differ and the trainer
        measured the fixed cost of a micro-batch, that cost follows the number of micro-batches."""
        now, rows = self.now, micro_batch_overhead_share(self.reading)
        if rows is not None and _same_but_rows(now.layouts, then.layouts):
            fewer = float(then.time.work.micro_batches[0] / now.time.work.micro_batches[0])
            return parts.work * (rows * fewer + 1 - rows)
        recompute = min(self.recompute_s, parts.work)
        work = (parts.work - recompute) * self._work_ratio(then)
        return work + (_carried(recompute, now.time.recompute[0], then.time.recompute[0]) if recompute else 0.0)

    def _work_ratio(self, then: Prediction) -> float:
        """Ratio of work after to before: launches by their number, the rest by its predicted time. Recompute is apart
        where it was measured."""
        now, fixed, apart = self.now, self.fixed, self.recompute_s > 0
        if fixed is None:
            before, after = (
                worked(prediction, apart) + float(prediction.time.launch[0] + prediction.time.other[0])
                for prediction in (now, then)
            )
            return after / before
        if now.precision() != then.precision() and self.reading.get("fusible_fraction") is not None:
            return self._narrower_ratio(then, fixed)
        fewer = launches(then, apart) / launches(now, apart)
        if now.case.software.eager_layers and _same_but_rows(now.layouts, then.layouts):
            return fixed * fewer + 1 - fixed  # the same work per row: small GEMMs lose only their calls
        return fixed * fewer + (1 - fixed) * without_calls(then, apart) / without_calls(now, apart)

    def _narrower_ratio(self, then: Prediction, fixed: float) -> float:
        """The ratio for another dtype: measured memory-bound ops by their predicted time, the rest by that of GEMMs and
        attention; launches stay."""
        fusible = min(1 - fixed, self.reading.get("fusible_fraction") or 0.0)
        memory = _of(then, "memory", "optimizer") / _of(self.now, "memory", "optimizer")
        compute = _of(then, "gemm", "attention") / _of(self.now, "gemm", "attention")
        return fixed + fusible * memory + (1 - fixed - fusible) * compute

    @property
    def recompute_s(self) -> float:
        """Seconds of recompute per step, where it was measured: its share in the steps that measured it, times a usual
        step."""
        share = recompute_share(self.reading)
        return share * self.parts.step if share and self.parts is not None else 0.0

    @cached_property
    def fixed(self) -> float | None:
        """Share of a recorded step that follows the number of launches; None where none was recorded."""
        return launch_overhead_share(self.reading, self.plan)


def launches(prediction: Prediction, apart: bool = False) -> float:
    """Kernels per step as the planner counts them: forward, recompute unless it is `apart`, and backward of every
    micro-batch."""
    time, layer = prediction.time, prediction.time.work.layer
    recomputed = 0.0 if apart else float(time.recompute[0] > 0) / float(prediction.layouts.recompute_every[0])
    per_layer = float(layer.kernels_forward[0]) * (1 + recomputed) + float(layer.kernels_backward[0])
    return float(time.work.micro_batches[0]) * per_layer


def worked(prediction: Prediction, apart: bool = False) -> float:
    """Seconds of a step in which the device computes, without recompute where it is `apart`."""
    time = prediction.time
    total = float(time.compute[0] + time.optimizer[0] + time.offload[0])
    return total - float(time.recompute[0]) if apart else total


def without_calls(prediction: Prediction, apart: bool = False) -> float:
    """The same without what the planner adds for every kernel, which counts as launching."""
    total, layers = worked(prediction, apart), float(prediction.time.work.stages.mean[0])
    return max(0.1 * total, total - launches(prediction, apart) * layers * prediction.case.curves.kernel_s)


def _same_but_rows(now: Layouts, then: Layouts) -> bool:
    """Whether only the rows per micro-batch differ."""
    return all(
        bool((getattr(now, field.name) == getattr(then, field.name)).all())
        for field in fields(now)
        if field.name != "micro_batch"
    )


def _of(prediction: Prediction, *names: str) -> float:
    return float(sum(getattr(prediction.time, name)[0] for name in names))


def _carried(measured: float, now: float, then: float) -> float:
    """A measured part, scaled by the predicted ratio; where none was predicted, the predicted part is added."""
    return measured * float(then / now) if now > 0 else measured + float(then)
