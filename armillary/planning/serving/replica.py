"""Replica: one copy of a model on its devices, and the time of its engine steps.

The time of a step is the sum over its operations of a soft roofline, with a fixed overhead per kernel, all-reduces
between tp ranks, all-to-alls between ep ranks and sends between pipeline stages:

    GEMM        ((flops / rate)ᵖ + (bytes / bandwidth)ᵖ)^(1/p)              rates: efficiency.toml, p: engines.toml
    decode attention   bytes / bandwidth · (1 + start / bytes per KV head)  one thread block per sequence and KV head
    prompt attention   max(flops / rate(keys, head dim), bytes / bandwidth)
    other       bytes / bandwidth

Times of collectives are in collectives.py. Without CUDA graphs (prefill) a step is at least as long as the host needs
to launch its kernels. The roofline is that of Williams et al., CACM 2009; adding terms rather than taking the larger
follows what skinny GEMMs measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from armillary.engine.scheduler.decision import StepWork
from armillary.planning.device_model.efficiency import Curves, curves, width_of
from armillary.planning.device_model.vectorised_layouts import PRECISIONS
from armillary.planning.serving.collectives import Collectives, Dispatch
from armillary.planning.serving.engines import Rates, physics
from armillary.planning.serving.forward_ops import EXPERT_GEMMS, Forward, Group, ServingDtypes, Split
from armillary.spec.arithmetic.attention_ops import AttentionShape
from armillary.spec.arithmetic.ops import Op
from armillary.spec.arithmetic.sublayers import attention_shape
from armillary.spec.hardware import Cluster
from armillary.spec.model import ModelConfig

if TYPE_CHECKING:  # the store's locks and sockets are slow to import
    from armillary.planning.device_model.correction import Correction
    from armillary.store.peaks import Peaks
    from armillary.store.stored_weights import StoredWeights

TILE = 128
"""rows and columns of a thread block's tile of a GEMM"""
MOST_OVERLAP = 8.0
"""exponent at which only the larger of the two times counts"""
EXPERT_TILE = 64
"""rows that an expert's last thread block computes in vain, on average; at most as many as it has"""
SHARED_HEAD_DIM = 128
"""head dim for which every engine has decode kernels that read a KV head once for its group of query heads"""
PARTS = {
    "gemm_s": "compute",
    "experts_s": "compute",
    "attention_s": "compute",
    "other_s": "compute",
    "comm_s": "communication",
    "kernels_s": "overhead",
    "host_s": "overhead",
}
"""field of EngineStepTime -> part of the step that runs can correct (device_model/correction.py)"""
CALLS = {"step": 235, "row": 90, "layer": 61, "layer and row": 22}
"""torch calls per step of our engine on a CPU, sampling included; a test counts them"""


@dataclass(frozen=True, kw_only=True)
class EngineStepTime:
    """Seconds per engine step, by kind of work."""

    gemm_s: float = 0.0
    """GEMMs except the experts'"""
    experts_s: float = 0.0
    attention_s: float = 0.0
    """attention, reads of the KV cache included"""
    other_s: float = 0.0
    """norms, rotations, activations, routing, embedding"""
    kernels_s: float = 0.0
    comm_s: float = 0.0
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, part.name) for part in fields(self)))

    def parts(self) -> dict[str, float]:
        """Seconds by part of PARTS."""
        sums = dict.fromkeys(PARTS.values(), 0.0)
        for name, part in PARTS.items():
            sums[part] += getattr(self, name)
        return sums

    def corrected(self, factors: Mapping[str, float]) -> EngineStepTime:
        """Every term times the factor of its part."""
        return EngineStepTime(**{name: getattr(self, name) * factors[part] for name, part in PARTS.items()})


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One copy of a model as it is served."""

    config: ModelConfig
    cluster: Cluster
    """its devices; only the links inside the replica count"""
    split: Split = field(default_factory=Split)
    dtypes: ServingDtypes = field(default_factory=ServingDtypes)
    rates: Rates = field(default_factory=physics)
    measured: Peaks | None = None
    stored: StoredWeights | None = None
    """the files of a quantized checkpoint, which is loaded as it is"""
    correction: Correction | None = None
    """factors from engine steps of this cluster (armillary plan calibrate)"""
    dispatch: Dispatch = "all-to-all"
    """how rows get to the experts of other ranks"""
    same_tokens: bool = False
    """every token of a step is the same one, and goes to the same experts: some benchmarks send padding"""
    keeps_chunks: bool = False
    """keys of layers with chunked attention stay in the KV cache after their chunk"""

    @cached_property
    def forward(self) -> Forward:
        """The operations of one device."""
        return Forward(config=self.config, split=self.split, dtypes=self.dtypes, same_tokens=self.same_tokens)

    @cached_property
    def collectives(self) -> Collectives:
        """Their times between the replica's ranks."""
        return Collectives(
            config=self.config,
            cluster=self.cluster,
            split=self.split,
            rates=self.rates,
            compute=self.dtypes.compute,
            dispatch=self.dispatch,
        )

    @cached_property
    def curves(self) -> Curves:
        return curves(self.cluster.chip, self.measured)

    @cached_property
    def bytes_per_s(self) -> float:
        return self.curves.bytes_per_s * self.rates.memory_rate

    # --- steps

    def prefill(self, tokens: int, count: int = 1, cached: int = 0) -> EngineStepTime:
        """`count` prompts with `tokens` new and `cached` earlier tokens each, in one step."""
        return self.step([Group(count=count, queries=tokens, keys=cached + tokens)])

    def decode(self, count: int, context: int) -> EngineStepTime:
        """One more token for each of `count` sequences of `context` tokens."""
        return self.step([Group(count=count, queries=1, keys=context + 1)])

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step with that work."""
        return self.step_of(work).total_s

    def step_of(self, work: StepWork) -> EngineStepTime:
        """A step with that work; its decodes are taken as equally long, and so are its prefill chunks."""
        rows, chunks = int(work.decode_tokens), int(work.prefill_rows)
        groups = []
        if rows:
            groups.append(Group(count=rows, queries=1, keys=round(work.context_tokens / rows)))
        if chunks:
            keys = round((work.prefill_past + work.prefill_tokens) / chunks)
            groups.append(Group(count=chunks, queries=round(work.prefill_tokens / chunks), keys=keys))
        return self.step(groups)

    def step(self, groups: Sequence[Group]) -> EngineStepTime:
        """One engine step over `groups`, all sequences of the replica; each ep rank runs its share."""
        key = tuple(groups)
        if key not in self._steps:
            planned = self._step(groups)
            self._steps[key] = planned if self.correction is None else planned.corrected(self.correction.factors)
        return self._steps[key]

    @cached_property
    def _steps(self) -> dict[tuple[Group, ...], EngineStepTime]:
        """Cache of priced steps: the search for a rate asks for the same few."""
        return {}

    def _step(self, groups: Sequence[Group]) -> EngineStepTime:
        local = [
            Group(count=max(1, -(-group.count // self.split.ep)), queries=group.queries, keys=group.keys)
            for group in groups
            if group.count
        ]
        tokens, logits = sum(group.tokens for group in local), sum(group.count for group in local)
        decoding = all(group.queries == 1 < group.keys for group in local)
        parts = self._operations(self.forward.ops(tokens, logits, decoding=decoding))
        parts["attention_s"] = sum(self._attention_s(group) for group in local)
        single = decoding and tokens == 1
        decodes = 1.0 if single else self.rates.decode_attention
        attention = sum(decodes if queries == 1 else 1.0 for queries in {group.queries for group in local})
        parts["kernels_s"] += self.config.num_layers * self._kernel_s * attention
        if single:
            parts["kernels_s"] *= self.rates.one_row
        parts["comm_s"] = self.collectives.step_s(tokens)
        return self._with_host(EngineStepTime(**parts), parts["kernels_s"], decoding, logits)

    def _operations(self, ops: Sequence[tuple[Op, int]]) -> dict[str, float]:
        parts = {"gemm_s": 0.0, "experts_s": 0.0, "other_s": 0.0, "kernels_s": 0.0}
        for op, count in ops:
            if op.kind == "matmul":
                part = "experts_s" if op.name in EXPERT_GEMMS else "gemm_s"
                parts[part] += count * self._gemm_s(op)
            else:
                parts["other_s"] += count * op.bytes / self._eager_bytes_per_s
            parts["kernels_s"] += count * self._kernel_s
        return parts

    def _with_host(self, time: EngineStepTime, kernels_s: float, decoding: bool, rows: int) -> EngineStepTime:
        """A decode step runs from a CUDA graph; others wait where launching takes longer than running. On a CPU the
        torch calls are added. An engine whose scheduler waits for the device adds its time per request."""
        waited = self.rates.step_s + self.rates.row_s * rows
        if self._on_cpu:
            return replace(time, host_s=self.calls(rows) * self.curves.call_s + waited)
        launches = 0.0 if decoding or not self._kernel_s else kernels_s / self._kernel_s * self.rates.launch_s
        return replace(time, host_s=max(0.0, launches - time.total_s) + waited)

    def calls(self, rows: int) -> float:
        """Torch calls per step with `rows` sequences, on a CPU."""
        each = CALLS["layer"] + CALLS["layer and row"] * rows
        return CALLS["step"] + CALLS["row"] * rows + self.config.num_layers * each

    def head_s(self, rows: int) -> float:
        """Output projection of `rows` tokens: with pipeline stages, the extra work of the last one."""
        factor = 1.0 if self.correction is None else self.correction.compute
        ops = self.forward.ops(rows, rows, decoding=True)
        return factor * sum(count * self._gemm_s(op) for op, count in ops if op.name == "head")

    # --- parts

    @property
    def _kernel_s(self) -> float:
        """Fixed overhead per kernel of a GPU; torch calls of a CPU are counted separately."""
        return 0.0 if self._on_cpu else self.curves.kernel_s * self.rates.fixed_time

    @property
    def _eager_bytes_per_s(self) -> float:
        """Bytes/s of norms, rotations and activations: a CPU runs eager torch operators."""
        return self.curves.eager_bytes_per_s[self._width] if self._on_cpu else self.bytes_per_s

    @property
    def _width(self) -> str:
        return width_of(self.forward.dtype)

    @property
    def _on_cpu(self) -> bool:
        return self.cluster.chip.kind == "cpu"

    def _gemm_s(self, op: Op) -> float:
        """On a CPU by the curve over shapes, or by the rate at which a single row reads weights."""
        if self._on_cpu:
            return self._cpu_gemm_s(op)
        experts = op.name in EXPERT_GEMMS
        compute = self.forward.dtype if op.name == "head" else self.dtypes.compute
        rate, flops = self.curves.sustained(curve_name(compute)) * self.rates.compute_rate, op.flops
        if experts:
            rate *= self.rates.grouped * self.rates.expert_rate
            groups, _, n, k = op.shape
            flops = self.collectives.skew * (flops + min(op.flops, 2 * groups * EXPERT_TILE * n * k))
        weights = self.forward.dtype if op.name == "head" else self.dtypes.weights
        slower = self.rates.dequantise(weights, compute)
        rate /= slower if experts and compute == self.forward.dtype else 1.0  # dequantised in the kernel's main loop
        reads = op.bytes / self.bytes_per_s * slower
        power = self._overlap(op)
        return float(((flops / rate) ** power + reads**power) ** (1 / power))

    def _cpu_gemm_s(self, op: Op) -> float:
        groups, m, n, k = op.shape
        compute = self.forward.dtype if op.name == "head" else self.dtypes.compute
        code = np.array(PRECISIONS.index(curve_name(compute)))
        rate = float(self.curves.gemm_flops(code, np.float64(m), np.float64(n), np.float64(k), np.float64(groups)))
        return max(op.flops / rate, op.bytes / self.curves.row_bytes_per_s[self._width])

    def _overlap(self, op: Op) -> float:
        """The exponent of a GEMM: with many waves of thread blocks on the same weights, the reads of one hide behind
        the arithmetic of another (the few rows of an expert make few waves)."""
        _, m, n, _ = op.shape
        waves = m * n / TILE**2 / self.curves.num_sms
        measured = None if op.name in EXPERT_GEMMS else self.curves.gemm_overlap
        single = self.rates.overlap if measured is None else measured
        return min(single + self.rates.overlap_waves * waves, MOST_OVERLAP)

    def _attention_s(self, group: Group) -> float:
        return sum(
            count * (self._decode_attention_s(op) if group.queries == 1 else self._prompt_s(op, group))
            for op, count in self.forward.attention(group)
        )

    def _decode_attention_s(self, op: Op) -> float:
        """One sequence, one layer: every KV head is a thread block that must start; query heads beyond the first of a
        group read again what the engine does not share. Heads of 128 are always shared: they got kernels first."""
        heads, kv_heads = self._shape.heads, 1 if self.config.mla else self._shape.kv_heads
        shared = self.config.mla is not None or self._shape.qk_dim == SHARED_HEAD_DIM
        reads = 1.0 if shared else 1 + self.rates.kv_reread * (heads / kv_heads - 1)
        started = 1 + self.rates.kv_start_bytes * kv_heads / op.bytes
        moved = op.bytes * reads * started / (self.bytes_per_s * self.rates.kv)
        return float(max(moved, op.flops / (self.curves.sustained(self.forward.dtype) * self.rates.compute_rate)))

    def _prompt_s(self, op: Op, group: Group) -> float:
        code = np.array(PRECISIONS.index(self.forward.dtype))
        rate = float(self.curves.attention_flops(group.keys, self._shape.qk_dim, backward=False, precision=code))
        return float(max(op.flops / (rate * self.rates.prompt_attention), op.bytes / self.bytes_per_s))

    @cached_property
    def _shape(self) -> AttentionShape:
        return attention_shape(self.forward.local_config, self.config.layers[0])


def curve_name(dtype: str) -> str:
    """Key of Curves for a dtype: integers compute as fast as the float of their width."""

    return {"int8": "fp8", "fp4": "nvfp4", "int4": "nvfp4"}.get(dtype, dtype)
