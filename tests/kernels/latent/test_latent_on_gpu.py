"""Latent attention at the sizes of real models, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from armillary.kernels.core.op import Case, Op
from armillary.kernels.latent.latent_decode import LATENT_DECODE, LatentCase
from armillary.kernels.latent.latent_prefill import LATENT_PREFILL, LatentPrefillCase
from armillary.kernels.latent.latent_to_cache import LATENT_TO_CACHE, LatentCacheCase
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.latent.latent_batches import Shape, batch
from tests.kernels.pages import error, wide

pytestmark = pytest.mark.gpu

DECODES = {
    **{f"{heads} heads": LatentCase(batch=9, context=1000, heads=heads, ragged=True) for heads in (1, 16, 20, 32, 128)},
    **{f"pages of {page}": LatentCase(batch=3, context=700, heads=64, page=page) for page in (16, 32, 128)},
    **{f"pages of {page}, 16 heads": LatentCase(batch=3, context=700, page=page) for page in (16, 32, 128)},
    "a long sequence": LatentCase(batch=1, context=20000, heads=128),
    "drafted tokens": LatentCase(batch=5, context=600, queries=4, ragged=True),
    "drafted tokens, 128 heads": LatentCase(batch=5, context=600, queries=2, heads=128, ragged=True),
    "a chunk of a prompt": LatentCase(batch=2, context=500, queries=150, heads=16),
    "fp16": LatentCase(batch=5, context=600, heads=128, dtype="fp16"),
    "fp32": LatentCase(batch=5, context=600, heads=16, dtype="fp32"),
    "a smaller latent": LatentCase(batch=5, context=600, heads=40, rank=256, rope_dim=32),
}
PREFILLS = {
    "prompts": LatentPrefillCase(batch=3, context=700, queries=700, heads=4),
    "chunks": LatentPrefillCase(batch=3, context=1500, queries=300, heads=16, page=16, ragged=True),
    "fp16": LatentPrefillCase(batch=1, context=900, queries=500, heads=4, dtype="fp16"),
    "fp32": LatentPrefillCase(batch=1, context=300, queries=200, heads=4, dtype="fp32"),
}
ROWS = {
    "16 heads": LatentCacheCase(tokens=100),
    "128 heads, halves": LatentCacheCase(tokens=33, heads=128, interleaved=False),
}
CALLS = [
    pytest.param(op, case, id=f"{op.name}, {name}")
    for op, cases in ((LATENT_DECODE, DECODES), (LATENT_PREFILL, PREFILLS), (LATENT_TO_CACHE, ROWS))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("op", "case"), CALLS)
def test_it_agrees(op: Op, case: Case) -> None:
    assert_agrees(op, case)


@pytest.mark.parametrize("heads", [16, 128])
def test_what_no_sequence_owns_is_not_read(heads: int) -> None:
    shape = Shape(queries=[1, 0, 1, 1], lengths=[300, 5, 0, 1], heads=heads, rank=512, rope_dim=64, padding=3)
    made = batch(shape, dtype=torch.bfloat16, device="cuda")
    right = LATENT_DECODE.reference(*wide(made.decode(), torch.float32))
    assert error(loaded(LATENT_DECODE)(*made.decode()), right) < 1e-2


@pytest.mark.parametrize("heads", [16, 128])
def test_one_graph_serves_any_lengths(heads: int) -> None:
    case = LatentCase(batch=4, context=3000, heads=heads, ragged=True)
    inputs = LATENT_DECODE.inputs(case, torch.Generator("cuda").manual_seed(0))
    lengths, run = inputs[3].lengths_B, loaded(LATENT_DECODE)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        run(*inputs)
        with torch.cuda.graph(graph):
            captured = run(*inputs)
        for other in ([3000, 1, 64, 65], [5, 5, 5, 5]):
            lengths.copy_(torch.tensor(other))
            graph.replay()
            rows = replace(inputs[3])  # spans are read anew
            assert torch.equal(captured, run(*inputs[:3], rows, inputs[4]))
            wide_inputs = (*(x.float() for x in inputs[:3]), rows, inputs[4])
            assert error(captured, LATENT_DECODE.reference(*wide_inputs)) < 1e-2
