"""Ranks that share a row: the ring gives what attention over whole rows gives, and training is that of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from armillary.errors import BadLayout
from armillary.kernels.attention.attention import AttentionOptions
from armillary.model.layers.attention_forms import packed, plain
from armillary.parallel.context import ring_attention_block as ring_block
from armillary.parallel.context.ring_attention import ALL, NONE, SOME, make_block_mask, pieces, visible_pairs
from armillary.parallel.context.shard_sequence import Context
from armillary.parallel.mesh import Mesh, make_mesh
from armillary.parallel.world import World, join_world
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.placement import axis_sizes
from armillary.spec.model import LayerKind, Rope
from armillary.training.parity.case import Case, many, tiny
from tests.kernels.interpreter import needs_interpreter
from tests.parallel.test_strategies import check
from tests.ranks import Ranks

B, T, N, K, D = 2, 48, 4, 2, 8
HOWS = {
    "plain": {},
    "window": {"window": 7},
    "wide window": {"window": 29},
    "chunks": {"chunk": 7},
    "cap": {"softcap": 2.0},
    "sinks": {"sinks_N": torch.linspace(-1.0, 1.0, N)},
    "slopes": {"slopes_N": torch.linspace(0.1, 0.5, N)},
    "all": {"window": 11, "softcap": 3.0, "sinks_N": torch.linspace(-1.0, 1.0, N)},
}


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, N, D), (B, T, K, D), (B, T, K, D), (B, T, N, D))
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    documents = (torch.rand(B, T, generator=generator) < 0.1).long().cumsum(1)
    return q, k, v, grad, documents


def asked(name: str) -> AttentionOptions:
    values = {key: x.double() if isinstance(x, Tensor) else x for key, x in HOWS[name].items()}
    if "sinks_N" in values:
        values["sinks_N"] = values["sinks_N"].requires_grad_()
    return AttentionOptions(scale=0.3, **values)


def results(attend: object, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, how: AttentionOptions) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(0, *inputs, how)  # type: ignore[operator]
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def ring_against_whole(size: int, names: tuple[str, ...]) -> list[str]:
    """These options with and without documents, in fp64; gives what differs by more than rounding."""
    wrong = []
    with join_world("cpu") as world:
        context = make_mesh(Layout(cp=size), world).context
        assert context is not None
        ring = Context.of(context)
        q, k, v, grad, documents = drawn()
        for name in names:
            for docs in (None, documents):
                theirs, ours = asked(name), asked(name)
                whole = results(plain if docs is None else packed(docs), q, k, v, grad, theirs)
                cut = results(ring.attend(docs), *map(ring.shard, (q, k, v, grad)), ours)
                differ = max(float((a - ring.shard(b)).abs().max()) for a, b in zip(cut, whole, strict=True))
                if ours.sinks_N is not None and theirs.sinks_N is not None:
                    summed = ours.sinks_N.grad.clone()
                    torch.distributed.all_reduce(summed, group=context)
                    differ = max(differ, float((summed - theirs.sinks_N.grad).abs().max()))
                if not differ < 1e-12:
                    wrong.append(f"{name}, documents {docs is not None}: {differ}")
    return wrong


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_ring_gives_what_the_whole_row_gives(ranks: Ranks, size: int) -> None:
    names = tuple(HOWS) if size == 2 else ("wide window", "all")
    assert ranks.run(size, ring_against_whole, size, names) == [[]] * size


def test_every_rank_has_as_much_to_do_in_every_turn() -> None:
    """Of the four pairs of pieces two are seen; on the diagonal two of three are half hidden."""
    for size in (2, 3, 8):
        assert sorted(piece for rank in range(size) for piece in pieces(rank, size)) == list(range(2 * size))
        for rank in range(size):
            counts = [len(list(visible_pairs(rank, source, size))) for source in range(size)]
            assert counts == [3 if source == rank else 2 for source in range(size)]


def test_pieces_without_a_document_in_common_do_not_meet() -> None:
    """Four pieces of three tokens; a row of documents 0, 1 and 2, and the same beside a row of one document."""
    row = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2]])
    assert make_block_mask(row, 2) == [
        ALL,
        ALL,
        SOME,
        NONE,
        ALL,
        ALL,
        SOME,
        NONE,
        SOME,
        SOME,
        SOME,
        NONE,
        NONE,
        NONE,
        NONE,
        ALL,
    ]
    both = make_block_mask(torch.cat((row, torch.zeros_like(row))), 2)
    assert [both[i] for i in (0, 1, 2, 3, 12, 15)] == [ALL, ALL, SOME, SOME, SOME, ALL]


def test_rows_are_cut_from_both_ends() -> None:
    row = torch.arange(8)[None]
    assert [Context(group="", size=2, rank=r).shard(row).tolist() for r in (0, 1)] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    with pytest.raises(BadLayout, match="cp=3 does not divide 8 tokens into 6 equal pieces"):
        Context(group="", size=3, rank=0).shard(row)


def test_a_ring_lies_between_shards_and_tensor_parallel_ranks() -> None:
    sizes = axis_sizes(Layout(dp=2, cp=4, tp=2, zero=3))
    mesh = Mesh(sizes, World(rank=0, size=16, local_rank=0, device=torch.device("cpu")), cp=4)
    assert (sizes["shard"], mesh.num_copies, mesh.dp_size) == (8, 8, 2)
    assert axis_sizes(Layout(dp=2, cp=4))["replicate"] == 8


LAYOUTS = {
    2: [
        Case(layout=Layout(cp=2, precision="fp32"), accumulate=2, documents=True, steps=3),
        Case(layout=Layout(cp=2, zero=3, precision="fp32", recompute="full"), accumulate=2, chunk=20, steps=3),
        Case(layout=Layout(cp=2, zero=1, precision="fp32", recompute="selective"), accumulate=2, meta=True, steps=2),
        Case(layout=Layout(cp=2, precision="fp32"), dtype="fp64", documents=True, steps=2),
    ],
    4: [
        Case(layout=Layout(cp=2, dp=2, precision="fp32"), documents=True, accumulate=2, steps=3),
        Case(layout=Layout(cp=2, tp=2, precision="fp32"), documents=True, steps=3),
        Case(layout=Layout(cp=2, dp=2, zero=3, precision="fp32"), dtype="fp64", accumulate=2, steps=2),
    ],
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_is_that_of_one_process(ranks: Ranks, world: int) -> None:
    cases = LAYOUTS[world]
    check(ranks.run(world, many, cases)[0], cases)


def test_other_attention_trains_too(ranks: Ranks) -> None:
    """Sliding windows, chunks, sinks, and rotary frequencies that depend on the longest position of all ranks."""
    kinds = (LayerKind(attention="sliding"), LayerKind(), LayerKind(attention="chunked"))
    config = tiny(kv_heads=4, layers=kinds, window=5, sinks=True, context=8, rope=Rope(scaling="dynamic", factor=2.0))
    cases = [Case(layout=Layout(cp=2, precision="fp32"), dtype="fp64", config=config, steps=3, documents=True)]
    check(ranks.run(2, many, cases)[0], cases)


def test_a_wrong_cut_would_be_seen(ranks: Ranks) -> None:
    """Rows cut in the plain order, which the ring does not expect, train differently."""
    case = replace(LAYOUTS[2][0], steps=2)
    found = ranks.run(2, in_plain_order, case)[0]
    with pytest.raises(AssertionError, match="loss"):
        check(found, [case])


def in_plain_order(case: Case) -> list[object]:
    cut = Context.shard
    Context.shard = lambda self, x: x.chunk(self.size, dim=1)[self.rank]  # type: ignore[method-assign]
    try:
        return many([case])  # type: ignore[return-value]
    finally:
        Context.shard = cut  # type: ignore[method-assign]


BLOCKS: dict[str, tuple[bool, dict[str, object]]] = {
    "own": (True, {}),
    "another's": (False, {}),
    "another's, capped": (False, {"softcap": 3.0}),
    "own, documents": (True, {"documents": True}),
    "own, window": (True, {"window": 5, "documents": True}),
    "own, slopes": (True, {"slopes_N": torch.linspace(0.1, 0.5, N)}),
}


def block_against_kernel(kind: str, device: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """(by the kernel, written out) of outputs, and of gradients against the softmax of a longer row."""
    generator = torch.Generator().manual_seed(1)
    causal, asked = BLOCKS[kind]

    def normal(heads: int) -> Tensor:
        return torch.randn(1, 32, heads, 16, generator=generator).to(device, dtype)

    q, grad, k, v, other_k, other_v = normal(N), normal(N), normal(K), normal(K), normal(K), normal(K)
    documents = (torch.arange(32)[None] // 9).to(device) if asked.get("documents") else None
    settings = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in asked.items() if key != "documents"}
    options = ring_block.Options(scale=0.3, **settings)  # type: ignore[arg-type]
    place = ring_block.BlockPosition(
        distance=0 if causal else 32, causal=causal, queries_BT=documents, keys_BS=documents
    )
    part = ring_block._forward(q, k, v, options, place)
    ours = ring_block._kernel_forward(q, k, v, options, place)
    open_place = ring_block.BlockPosition(distance=64, causal=False)
    rest = ring_block._forward(q, other_k, other_v, ring_block.Options(scale=0.3), open_place)
    whole = ring_block.FullSoftmax.of(grad, *ring_block.merge(*part, *rest))
    wanted = (*part, *ring_block._backward(whole, q, k, v, options, place))
    return list(zip((*ours, *ring_block._kernel_backward(whole, q, k, v, options, place)), wanted, strict=True))


@needs_interpreter
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_by_the_kernel_are_those_written_out(kind: str) -> None:
    """Of which a GPU makes the ring."""
    for ours, wanted in block_against_kernel(kind, "cpu", torch.float32):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_on_a_gpu(kind: str) -> None:
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for ours, wanted in block_against_kernel(kind, "cuda", dtype):
            assert torch.dist(ours, wanted) <= limit * wanted.norm()
