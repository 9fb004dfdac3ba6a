"""What apply does beyond plain training: adapters, half formats, evaluation, totals, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.errors import BadLayout
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer, build
from armillary.parallel.apply import Sharded, apply
from armillary.parallel.mesh import Mesh, make_mesh
from armillary.parallel.world import World, join_world
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.placement import axis_sizes
from armillary.training.parity.case import ROWS, Case, batch, many, tiny
from armillary.training.step.loss import loss_sum
from tests.parallel.test_strategies import check
from tests.ranks import Ranks


def spread(layout: Layout) -> Sharded:
    with join_world("cpu") as world:
        model = build(tiny(), dtype=torch.float32, device="cpu", seed=1)
        return apply(model, layout, make_mesh(layout, world), loss=loss_sum)


def test_adapters_on_a_frozen_model(ranks: Ranks) -> None:
    layouts = [Layout(tp=2, precision="fp32"), Layout(dp=2, precision="fp32")]
    layouts += [Layout(dp=2, zero=zero, recompute="full", precision="fp32") for zero in (1, 3)]
    cases = [Case(layout=layout, dtype="fp64", lora=2, steps=3) for layout in layouts]
    check(ranks.run(2, many, cases)[0], cases)


def test_a_model_spread_before_it_has_weights_trains_alike(ranks: Ranks) -> None:
    layouts = [Layout(dp=2, precision="fp32"), Layout(tp=2, precision="fp32"), Layout(dp=2, zero=3, precision="fp32")]
    config = tiny(positions="alibi")
    cases = [Case(layout=layout, dtype="fp64", steps=2, meta=True, config=config) for layout in layouts]
    check(ranks.run(2, many, cases)[0], cases)


# --- half formats: products in bf16, gradients summed in fp32


def bf16_gradients(zero: int) -> dict[str, Tensor]:
    sharded = spread(Layout(dp=2, zero=zero, precision="bf16"))
    first = ROWS // 2 * sharded.mesh.dp_rank
    with sharded.accumulate(last=True):
        half_loss(sharded.model, slice(first, first + ROWS // 2)).backward()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in sharded.model.parameters())
    return {name: p.grad.full_tensor() for name, p in sharded.model.named_parameters()}


def half_loss(model: Transformer, rows: slice) -> Tensor:
    tokens, targets, _ = (x[rows] for x in batch(Case(layout=Layout()), 0))
    hidden = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), plain)
    return loss_sum(model, hidden, targets, chunk=0)


@pytest.mark.parametrize("zero", [1, 3])
def test_products_are_in_bf16_and_sums_of_gradients_in_fp32(ranks: Ranks, zero: int) -> None:
    found = ranks.run(2, bf16_gradients, zero)[0]
    halves = []
    for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        model = build(tiny(), dtype=torch.float32, device="cpu", seed=1).to(torch.bfloat16)
        half_loss(model, rows).backward()
        halves.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, halves[0][name] + halves[1][name], rtol=0, atol=0)


def autocast_loss(layout: Layout) -> float:
    sharded = spread(layout)
    tokens, targets, _ = batch(Case(layout=layout), 0)
    with torch.autocast("cpu", torch.bfloat16), sharded.accumulate(last=True):
        hidden = sharded.model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), plain)
        loss = sharded.loss_sum(hidden, targets)
        loss.backward()
    return float(loss.detach())


def test_autocast_reaches_products_that_are_cut(ranks: Ranks) -> None:
    model = build(tiny(), dtype=torch.float32, device="cpu", seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = half_loss(model, slice(0, ROWS)).item()
    in_fp32 = half_loss(model, slice(0, ROWS)).item()
    found = ranks.run(2, autocast_loss, Layout(tp=2))
    assert found[0] == found[1] == pytest.approx(wanted, rel=1e-4) and found[0] != pytest.approx(in_fp32, rel=1e-8)


# --- evaluation, totals, names


def after_evaluation() -> tuple[list[bool], float, list[str]]:
    sharded = spread(Layout(dp=2, zero=2, precision="fp32"))
    tokens, targets, _ = batch(Case(layout=Layout()), 0)
    with sharded.evaluating():
        hidden = sharded.model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), plain)
        loss = sharded.loss_sum(hidden, targets)
    assert not loss.requires_grad
    parameters = dict(sharded.model.named_parameters())
    return [isinstance(p, DTensor) for p in parameters.values()], float(sharded.total(loss) / loss), list(parameters)


def test_evaluation_leaves_shards_under_the_models_own_names(ranks: Ranks) -> None:
    names = [name for name, _ in build(tiny(), dtype=torch.float32, device="meta").named_parameters()]
    for are_shards, ranks_summed, found in ranks.run(2, after_evaluation):
        assert all(are_shards) and ranks_summed == pytest.approx(2.0) and found == names


# --- one process, and what is refused


def lone_mesh(layout: Layout, size: int = 1) -> Mesh:
    world = World(rank=0, size=size, local_rank=0, device=torch.device("cpu"))
    return Mesh(axis_sizes(layout), world)


def test_one_process_needs_no_process_group() -> None:
    layout = Layout(zero=3, precision="fp32")
    sharded = apply(build(tiny(), dtype=torch.float32, device="cpu", seed=1), layout, lone_mesh(layout), loss=loss_sum)
    with sharded.accumulate(last=True):
        half_loss(sharded.model, slice(0, ROWS)).backward()
    plainly = torch.stack([p.grad.norm() for p in sharded.model.parameters() if p.grad is not None]).norm()
    assert float(sharded.clip(0.5)) == pytest.approx(float(plainly), rel=1e-6)
    assert float(sharded.clip(0.0)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "changes", "words"),
    [
        (dict(tp=3), {}, "tp=3 does not divide 8 KV heads of tiny; try --set layout.tp=2 or 4"),
        (dict(tp=2), dict(kv_heads=1), "tp=2 does not divide 1 KV heads of tiny; try --set layout.tp=1"),
        (dict(dp=4, zero=3, shard=3), {}, "shard=3 does not divide dp=4; try --set layout.shard=2 or 4"),
        (dict(dp=2, pp=2, zero=3, schedule="zero_bubble"), {}, r"try --set layout.zero=2 \(or layout.schedule=1f1b\)"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(given: dict, changes: dict, words: str) -> None:  # type: ignore[type-arg]
    layout = Layout(**given)
    model = build(tiny(**changes), dtype=torch.float32, device="meta")
    with pytest.raises(BadLayout, match=words):
        apply(model, layout, lone_mesh(layout, size=8))


def refuses_odd_tokens() -> str:
    sharded = spread(Layout(tp=2, precision="fp32"))
    tokens = torch.zeros(1, 7, dtype=torch.long)
    with pytest.raises(BadLayout) as refused:
        sharded.model(tokens, torch.arange(7)[None], plain)
    return str(refused.value)


def test_tensor_parallelism_says_what_it_cannot_cut(ranks: Ranks) -> None:
    assert set(ranks.run(2, refuses_odd_tokens)) == {
        "tp=2 does not divide 7 tokens; try --set layout.sequence_parallel=false"
    }
