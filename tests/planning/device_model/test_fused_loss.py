"""The planner's idea of our fused loss is the kernel's own: the same chunks, and the gradients beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from armillary.kernels.loss.linear_cross_entropy_chunked import SPARE_BYTES, _chunk_rows
from armillary.planning.device_model.frameworks import OURS
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training import peak_memory
from armillary.planning.training.memory_breakdown import memory
from armillary.spec.layout import Layout
from tests.planning.cases import case_of


@pytest.mark.parametrize("micro_batch", [1, 4, 32])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "tinyllama-1.1b"])
def test_chunks_are_the_kernel_s(model: str, micro_batch: int) -> None:
    case = replace(case_of(model, "h200"), sequence=4096, batch_tokens=4096 * micro_batch, software=OURS)
    config, tokens = case.model, 4096 * micro_batch
    sizes = ((tokens, config.hidden), (config.vocab, config.hidden))
    x, weight = (torch.empty(size, device="meta", dtype=torch.bfloat16) for size in sizes)
    rows = _chunk_rows(x, weight, True, SPARE_BYTES)
    gradients = tokens * config.hidden * 2 + config.vocab * config.hidden * (4 if rows < tokens else 2)
    layouts = as_arrays([Layout(micro_batch=micro_batch, precision="bf16")])
    stage = peak_memory.Stage(
        case=case,
        layouts=layouts,
        params=None,
        states=None,
        in_flight=np.ones(1),  # type: ignore[arg-type]
        micro_batches=np.ones(1),
        makes_logits=True,
    )
    found = float(stage._loss()[0])
    assert found == pytest.approx(rows * config.vocab * 2 + gradients, rel=0.02)
    assert memory(case, layouts).allocated[0] > found
