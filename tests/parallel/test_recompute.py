"""What the backward pass makes again, by counting what it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from armillary.model.fused.passes import FusedOptions
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import build
from armillary.parallel.recompute import recompute, save_policy
from armillary.spec.model import LayerKind
from armillary.training.parity.case import Case, batch, tiny
from armillary.training.step.loss import loss_sum
from tests.model.layers.test_attention_forms import small

LAYERS = 4


class Counting(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.ran[name] = self.ran.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def backward(kind: str, every: int = 1) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Gradients, and what the backward pass ran."""
    config = tiny(layers=(LayerKind(),) * LAYERS)
    model = build(config, dtype=torch.float32, device="cpu", seed=1)
    recompute(model, kind=kind, interval=every)
    tokens, targets, _ = batch(Case(layout=None, config=config), 0)  # type: ignore[arg-type]
    hidden = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), plain)
    loss = loss_sum(model, hidden, targets, chunk=0)
    with Counting() as counting:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, counting.ran


@pytest.mark.parametrize(("kind", "every"), [("full", 1), ("full", 2), ("selective", 1), ("selective", 3)])
def test_gradients_are_the_same_bit_for_bit(kind: str, every: int) -> None:
    wanted, found = backward("none")[0], backward(kind, every)[0]
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_full_recompute_runs_every_product_again_and_selective_none() -> None:
    products = {kind: backward(kind)[1]["mm"] for kind in ("none", "selective", "full")}
    # the last product of a layer is not needed by its own backward pass, and torch stops before it
    assert products["full"] == products["none"] + 3 * LAYERS
    assert products["selective"] == products["none"]


def test_both_run_norms_again() -> None:
    norms = {kind: backward(kind)[1].get("rsqrt", 0) for kind in ("none", "selective", "full")}
    assert norms == {"none": 0, "selective": 2 * LAYERS, "full": 2 * LAYERS}


def test_one_layer_in_every_k() -> None:
    assert [backward("full", every)[1].get("rsqrt", 0) for every in (1, 2, 3, 9)] == [8, 4, 4, 2]


@pytest.mark.parametrize("inner", [4, 64])
def test_an_adapter_s_second_product_is_made_again(inner: int) -> None:
    """Its result is as large as the layer's own, which it is added to and which is kept."""
    x, w, b, own = torch.randn(8, inner), torch.randn(128, inner), torch.randn(128), torch.randn(8, 128)
    ops, saved = torch.ops.aten, CheckpointPolicy.MUST_SAVE
    assert save_policy(None, ops.addmm.default, own, x, w.t()) == CheckpointPolicy.PREFER_RECOMPUTE
    assert save_policy(None, ops.mm.default, x, w.t()) == save_policy(None, ops.addmm.default, b, x, w.t()) == saved
    assert (
        save_policy(None, ops.linear.default, x, w) == save_policy(None, ops.bmm.default, x[None], w.t()[None]) == saved
    )


@pytest.mark.parametrize(("kind", "every"), [("selective", 1), ("selective", 2), ("full", 2), ("none", 1)])
def test_fused_blocks_recompute_by_themselves_and_others_are_wrapped(kind: str, every: int) -> None:
    model = build(small(num_layers=LAYERS), dtype=torch.float32, device="cpu", seed=1)
    fused = FusedOptions()
    for block in list(model.blocks.values())[:3]:
        block.fused = fused  # type: ignore[assignment]
    recompute(model, kind=kind, interval=every)
    blocks: list[Any] = list(model.blocks.values())
    chosen = [] if kind == "none" else list(range(0, LAYERS, every))
    by_itself = [index for index in chosen if kind == "selective" and index < 3]
    assert [index for index in range(3) if blocks[index].fused.recompute] == by_itself
    assert len({id(block.fused) for block in blocks[:3] if block.fused.recompute}) == min(1, len(by_itself))
    assert [i for i, block in enumerate(blocks) if hasattr(block, "watched")] == sorted(set(chosen) - set(by_itself))
