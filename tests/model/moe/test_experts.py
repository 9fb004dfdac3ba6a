"""Experts: sorted dispatch against the plain one, the rule by which choices are dropped, and what training adds."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armillary.kernels.gemm.grouped import GROUPED_LINEAR
from armillary.model.moe.experts import MixtureOfExperts, plain_dispatch
from armillary.model.moe.router_losses import Counts, RouterBalance, capacity_per_sequence, drop_beyond
from armillary.model.moe.sorted_dispatch import SortedDispatch
from armillary.spec.model import LayerKind, ModelConfig, MoE
from tests.kernels.agreeing import loaded
from tests.kernels.interpreter import needs_interpreter

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": dict(shared_ffn=12, shared_gate=True),
    "sigmoid, groups": dict(score="sigmoid", selection_bias=True, groups=2, top_groups=1, routed_scale=2.5),
    "biases": dict(score="softmax_topk", router_bias=True, expert_bias=True),
    "scaled inputs": dict(score="sigmoid", normalize=False, scale_input=True),
    "one expert": dict(num_experts=1, top_k=1),
    "four a token": dict(num_experts=6, top_k=4),
}


def layer(dtype: torch.dtype = torch.float64, **changes: Any) -> MixtureOfExperts:
    moe = MoE(**({"num_experts": 4, "top_k": 2, "ffn": 10} | changes))
    config = ModelConfig(
        hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=0, vocab=9, context=64, moe=moe, layers=(LayerKind(mlp="moe"),)
    )
    made = MixtureOfExperts(config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)
    return made


def inputs(sequences: int = 3, tokens: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(sequences, tokens, 8, generator=generator, dtype=dtype).requires_grad_()


def balance(made: MixtureOfExperts, **changes: Any) -> RouterBalance:
    size = Counts(made.moe.num_experts).size
    given = {"aux_weight": 0.0, "z_weight": 0.0, "capacity": None} | changes
    return RouterBalance(scale=torch.ones(()), tally=torch.zeros(size, dtype=torch.float64), **given)


def gradients(made: MixtureOfExperts, x: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    x.grad = None
    out = made(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum().backward()
    return {"out": out.detach(), "x": x.grad} | {name: p.grad for name, p in made.named_parameters()}  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_sorted_dispatch_does_what_the_plain_one_does(kind: str, capacity: float | None) -> None:
    made, x = layer(**KINDS[kind]), inputs()
    made.balance = balance(made, capacity=capacity)
    wanted = gradients(made, x)
    made.dispatch = SortedDispatch(drops=capacity is not None)
    found = gradients(made, x)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-13)


@needs_interpreter
@pytest.mark.parametrize("kind", ["plain", "biases", "one expert", "four a token"])
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_grouped_by_pointers_does_what_the_plain_one_does(kind: str, capacity: float | None) -> None:
    """The kernel of GPUs without TMA inside the layer that training uses, dropped choices too."""
    made, x = layer(torch.float32, **KINDS[kind]), inputs(dtype=torch.float32)
    made.balance = balance(made, capacity=capacity)
    wanted = gradients(made, x)
    made.dispatch = SortedDispatch(loaded(GROUPED_LINEAR, "triton, pointers"), drops=capacity is not None)
    for name, gradient in gradients(made, x).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)


def dense_dispatch(made: MixtureOfExperts, x_MH: Tensor) -> Tensor:
    """Every expert on every token, times its weight or zero."""
    weights, chosen = made.router(x_MH)
    by_expert_ME = torch.zeros(len(x_MH), made.moe.num_experts, dtype=x_MH.dtype).scatter(1, chosen, weights)
    total = torch.zeros_like(x_MH)
    for expert in range(made.moe.num_experts):
        total = total + made.experts.single(x_MH, expert) * by_expert_ME[:, expert, None]
    return total


@given(st.integers(1, 8), st.integers(1, 9), st.integers(1, 3), st.data())
@settings(max_examples=30, deadline=None)
def test_with_places_enough_it_is_the_dense_dispatch_to_the_bit(
    experts: int, tokens: int, sequences: int, data: st.DataObject
) -> None:
    """Whole numbers and a plain activation: every product and sum is exact, so their order makes no difference."""
    k = data.draw(st.integers(1, experts))
    made = layer(num_experts=experts, top_k=k)
    made.experts.activation = "relu"
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for parameter in made.experts.parameters():
        parameter.data = torch.randint(-4, 5, parameter.shape, generator=draw).double()
    x = torch.randint(-4, 5, (sequences, tokens, 8), generator=draw).double()
    made.balance = balance(made, capacity=float(experts))
    wanted = dense_dispatch(made, x.flatten(0, 1)).view_as(x)
    for dispatch in (plain_dispatch, SortedDispatch(drops=True), SortedDispatch()):
        made.dispatch = dispatch
        assert torch.equal(made(x), wanted)


def test_sorted_dispatch_under_autocast() -> None:
    made, x = layer(torch.float32), inputs(dtype=torch.float32)
    plain = made(x)
    made.dispatch = SortedDispatch()
    with torch.autocast("cpu", torch.bfloat16):
        half = made(x)
    assert half.dtype == x.dtype
    torch.testing.assert_close(half, plain, rtol=0.05, atol=0.05)


# --- capacity


def test_places_are_the_fair_share_times_the_factor() -> None:
    moe = MoE(num_experts=4, top_k=2, ffn=1)
    assert [capacity_per_sequence(8, moe, capacity) for capacity in (1.0, 1.25, 1.3)] == [4, 5, 6]
    assert (
        capacity_per_sequence(10, replace(moe, num_experts=2, top_k=1), 2.2) == 11
    )  # not 12: 2.2 · 5 is no more than 11
    assert capacity_per_sequence(1, replace(moe, num_experts=64), 1.0) == 1


def test_first_choices_come_before_second_ones_and_earlier_tokens_before_later() -> None:
    """Six tokens, three experts, two places each: who goes without is named here."""
    moe = MoE(num_experts=3, top_k=2, ffn=1)
    choices = torch.tensor([[0, 1], [1, 0], [0, 2], [0, 1], [2, 0], [1, 2]])
    kept = drop_beyond(choices, 1, moe, 0.5)
    # expert 0: firsts of tokens 0 and 2; token 3's first and the seconds of 1 and 4 are late
    # expert 1: firsts of tokens 1 and 5; seconds of 0 and 3 are late. expert 2: first of 4, second of 2; not that of 5
    assert kept.tolist() == [[0, 3], [1, 3], [0, 2], [3, 3], [2, 3], [1, 3]]


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5), st.floats(0.1, 2.0), st.data())
@settings(max_examples=60, deadline=None)
def test_the_rule_written_out(sequences: int, tokens: int, experts: int, capacity: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    moe = MoE(num_experts=experts, top_k=k, ffn=1)
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    choices = torch.rand(sequences * tokens, experts, generator=draw).topk(k).indices
    kept = drop_beyond(choices, sequences, moe, capacity)
    for row in range(sequences):
        left = dict.fromkeys(range(experts), capacity_per_sequence(tokens, moe, capacity))
        for rank in range(k):
            for token in range(row * tokens, (row + 1) * tokens):
                expert = int(choices[token, rank])
                left[expert] -= 1
                assert int(kept[token, rank]) == (expert if left[expert] >= 0 else experts)


def test_a_dropped_token_adds_nothing_and_the_others_keep_their_weights() -> None:
    made, x = layer(), inputs(sequences=1)
    made.balance = balance(made, capacity=0.3)
    weights, chosen = made.router(x.flatten(0, 1))
    kept = drop_beyond(chosen, 1, made.moe, 0.3)
    by_hand = torch.zeros_like(x[0])
    for token, (experts, scores) in enumerate(zip(kept.tolist(), weights, strict=True)):
        for expert, score in zip(experts, scores, strict=True):
            if expert < 4:
                by_hand[token] += made.experts.single(x[0, token : token + 1], expert)[0] * score
    assert (kept == 4).any()
    torch.testing.assert_close(made(x)[0], by_hand)


def test_enough_places_drop_nothing() -> None:
    made, x = layer(), inputs()
    made.dispatch = SortedDispatch(drops=True)
    plain = made(x)
    made.balance = balance(made, capacity=4.0)
    assert torch.equal(made(x), plain)


def test_nothing_is_dropped_without_gradients() -> None:
    made, x = layer(), inputs()
    made.balance = balance(made, capacity=0.1)
    with torch.no_grad():
        found = made(x)
    made.balance = None
    assert torch.equal(found, made(x))


# --- losses of the router


def by_formula(made: MixtureOfExperts, x: Tensor, aux: float, z: float) -> Tensor:
    """Both losses, sequence by sequence and token by token."""
    total = torch.zeros((), dtype=x.dtype)
    for sequence in x:
        logits = sequence @ made.router.weight.t()
        probability = made.router.probabilities(logits)
        chosen = made.router.choose(logits)[1]
        for expert in range(made.moe.num_experts):
            share = (chosen == expert).sum() / chosen.numel()
            total = total + aux * made.moe.num_experts * share * probability[:, expert].sum()
        total = total + z * logits.exp().sum(-1).log().square().sum()
    return total


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dispatch", [plain_dispatch, SortedDispatch()])
def test_gradients_are_those_of_the_losses_written_out(score: str, dispatch: Any) -> None:
    made, x = layer(score=score), inputs()
    made.dispatch = dispatch
    (made(x).square().sum() + by_formula(made, x, 0.3, 0.02)).backward()
    wanted = {name: p.grad.clone() for name, p in made.named_parameters()}  # type: ignore[union-attr]
    made.zero_grad()
    made.balance = balance(made, aux_weight=0.3, z_weight=0.02)
    made(x).square().sum().backward()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


def test_what_is_counted_is_what_happened() -> None:
    made, x = layer(), inputs()
    made.balance = balance(made, capacity=0.5)
    made(x).sum().backward()
    counts, tally = Counts(4), made.balance.tally
    _, chosen = made.router(x.flatten(0, 1))
    assert tally[counts.load].tolist() == torch.bincount(chosen.flatten(), minlength=4).tolist()
    assert float(tally[counts.probability].sum()) == pytest.approx(21.0)
    assert int(tally[counts.dropped]) == int((drop_beyond(chosen, 3, made.moe, 0.5) == 4).sum()) > 0
    assert float(tally[counts.aux]) == pytest.approx(by_formula(made, x, 1.0, 0.0).item())
    assert float(tally[counts.z]) == pytest.approx(by_formula(made, x, 0.0, 1.0).item())


def test_a_forward_pass_made_again_is_counted_once() -> None:
    made, x = layer(), inputs()
    made.balance = balance(made)
    out: Any = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
    out.sum().backward()
    assert int(made.balance.tally[Counts(4).load].sum()) == 2 * 21


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's own backward thread has no context at first
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sorted_dispatch_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    """By the kernels of a GPU, against the plain dispatch in fp64: as near as it is in the same format."""
    from armillary.kernels.core.agreement import relative_error

    sizes = KINDS[kind] | {"ffn": 16}
    made, x = layer(**sizes), inputs(tokens=40)
    wanted, chosen = gradients(made, x), made.router(x.flatten(0, 1))[1]
    in_format = layer(dtype, **sizes)
    in_format.load_state_dict(made.state_dict())
    plain = gradients(in_format, x.detach().to(dtype).requires_grad_())
    own = ("triton", "triton, pointers")
    for version in (*own, "torch") if dtype == torch.bfloat16 else own:
        fast = deepcopy(in_format).cuda()
        fast.dispatch = SortedDispatch(GROUPED_LINEAR.version(version).load())  # type: ignore[union-attr]
        found = gradients(fast, x.detach().to("cuda", dtype).requires_grad_())
        same = fast.router(x.detach().flatten(0, 1).to("cuda", dtype))[1].cpu()
        assert torch.equal(same.sort().values, chosen.sort().values), "these inputs have no ties"
        for name, gradient in wanted.items():
            limit = max(1e-5 if dtype == torch.float32 else 2e-2, 2 * relative_error(plain[name], gradient))
            assert relative_error(found[name].cpu(), gradient) <= limit, name
