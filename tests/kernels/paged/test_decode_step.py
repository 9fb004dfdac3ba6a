"""A decoding step as an engine makes it of these ops: fused kernels against plain torch, and one CUDA graph for many
steps, in which tokens, slots, tables and lengths change on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.op import find_op
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.kernels.paged.qkv_to_cache import QkvOptions
from armillary.kernels.sampling.sampling import Draws
from tests.kernels.interpreter import needs_interpreter
from tests.kernels.pages import error

NAMES = ("small_linear", "qkv_cache", "paged_attention", "sample", "logprobs")
HEADS, KV_HEADS, DIM, PAGE, ROWS, PER_ROW = 4, 2, 16, 4, 3, 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """Weights, and what changes from step to step."""

    weights: dict[str, Tensor]
    x: Tensor
    cache: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    batch: PagedBatch
    draws: Draws

    def forward(self, ops: dict[str, Any]) -> tuple[Tensor, ...]:
        """(logits, tokens, their log-probabilities), and the cache is written."""
        w, linear = self.weights, ops["small_linear"]
        qkv = linear(self.x, w["qkv"], w["norm1"])
        q, cache = ops["qkv_cache"](qkv, self.cache, self.slots, self.cos, self.sin, QkvOptions(norm="rms"))
        out = ops["paged_attention"](q, cache, self.batch, AttentionOptions(scale=DIM**-0.5))
        x = linear(out.flatten(1), w["out"], None, self.x)
        x = linear(linear(x, w["gate_up"], w["norm2"], None, 1e-6, True), w["down"], None, x)
        logits = linear(x, w["head"], w["norm3"])
        tokens = ops["sample"](logits, self.draws)
        return logits, tokens, ops["logprobs"](logits, tokens, 2)[0]

    def at(self, length: int) -> None:
        """The step that writes key number `length` of row 0; the others are a little behind, and rows differ."""
        generator = torch.Generator().manual_seed(length)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        self.batch.tables_BP.copy_(torch.randperm(ROWS * PER_ROW, generator=generator).view(ROWS, PER_ROW))
        for row in range(ROWS):
            last = max(0, length - row)
            page = int(self.batch.tables_BP[row, last // PAGE])
            self.slots[row] = page * PAGE + last % PAGE
            self.batch.lengths_B[row] = last + 1
        self.draws.steps_B.fill_(length)


def a_step(device: str, dtype: torch.dtype, hidden: int = 32) -> Step:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

    sizes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * DIM, hidden),
        "out": (hidden, HEADS * DIM),
        "gate_up": (96, hidden),
        "down": (hidden, 48),
        "head": (100, hidden),
    }
    weights = {name: normal(*size) for name, size in sizes.items()}
    weights |= {f"norm{i}": 1 + normal(hidden) for i in (1, 2, 3)}
    angles = torch.randn(ROWS, DIM // 2, generator=generator).to(device)
    whole = {"dtype": torch.int32, "device": device}
    each = {
        f"{name}_B": torch.full((ROWS,), value, device=device)
        for name, value in {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "seeds": 7, "steps": 0}.items()
    }
    return Step(
        weights=weights,
        x=normal(ROWS, hidden),
        cache=normal(ROWS * PER_ROW, 2, KV_HEADS, PAGE, DIM),
        slots=torch.zeros(ROWS, dtype=torch.int64, device=device),
        cos=angles.cos(),
        sin=angles.sin(),
        batch=PagedBatch(
            tables_BP=torch.zeros(ROWS, PER_ROW, **whole),
            starts=torch.arange(ROWS + 1, **whole),
            lengths_B=torch.zeros(ROWS, **whole),
            max_query=1,
        ),
        draws=Draws(**each),
    )


def ops(version: str) -> dict[str, Any]:
    """Functions that a layer can hold: found once, called without a lookup."""
    return {name: find_op(name).version(version).load() for name in NAMES}  # type: ignore[union-attr]


def wide(step: Step) -> Step:
    """The same numbers in fp64."""
    changed = {name: getattr(step, name).double() for name in ("x", "cache", "cos", "sin")}
    return replace(step, weights={name: w.double() for name, w in step.weights.items()}, **changed)


@needs_interpreter
@torch.no_grad()
def test_a_step_of_kernels_is_a_step_of_plain_torch() -> None:
    step = a_step("cpu", torch.float32)
    step.at(13)
    right = wide(step)
    logits, tokens, logprobs = step.forward(ops("triton"))
    right_logits, *_ = right.forward(ops("eager"))
    assert error(logits, right_logits) < 1e-5 and error(step.cache, right.cache) < 1e-5
    assert tokens.tolist() == ops("eager")["sample"](logits, step.draws).tolist()
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])


@pytest.mark.gpu
@torch.no_grad()
def test_one_graph_serves_every_step() -> None:
    step, fast = a_step("cuda", torch.bfloat16, hidden=64), ops("triton")
    step.at(5)
    start = step.cache.clone()
    step.forward(fast)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.forward(fast)
    for length in (1, 6, 17, 31):
        step.at(length)
        step.cache.copy_(start)
        graph.replay()
        found, cache = [x.clone() for x in captured], step.cache.clone()
        right = wide(replace(step, cache=start.clone()))
        assert error(found[0], right.forward(ops("eager"))[0]) < 2e-2 and error(cache, right.cache) < 1e-2
        step.cache.copy_(start)
        for mine, again in zip(found, step.forward(fast), strict=True):
            assert torch.equal(mine, again)  # captured or not: the same bits
