"""AdamW in one kernel steps as torch's does, clips on the way, and keeps copies equal to the parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from armillary.kernels.optimizer.adamw import AdamW, gradient_norm, takes
from tests.kernels.interpreter import needs_interpreter

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def parameters(device: str, *, seed: int = 0) -> list[nn.Parameter]:
    """Sizes within, at and beyond a kernel's block, and one of a single number."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (4096,), (70, 130), (1,)]
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
    return made


def copied(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    made = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for parameter, source in zip(made, parameters, strict=True):
        assert source.grad is not None
        parameter.grad = source.grad.clone()
    return made


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_torch_s(device: str) -> None:
    ours = parameters(device)
    theirs = copied(ours)
    one, other = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(4):
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_the_state_can_change_hands(device: str) -> None:
    """Two steps of torch's, the state and the weights handed over, one more of each: the same weights."""
    theirs = parameters(device)
    other = torch.optim.AdamW(theirs, **OPTIONS)
    other.step(), other.step()
    ours = copied(theirs)
    one = AdamW(ours, **OPTIONS)
    one.load_state_dict(other.state_dict())
    one.step(), other.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    torch.optim.AdamW(copied(theirs), **OPTIONS).load_state_dict(one.state_dict())


@pytest.mark.parametrize("device", DEVICES)
def test_half_gradients_scale_and_copies(device: str) -> None:
    ours = parameters(device)
    for parameter in ours:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad, parameter.grad_dtype = None, torch.bfloat16
        parameter.grad = gradient.bfloat16()
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        other.grad = mine.grad.float() * 0.25
    copies: dict[Tensor, Tensor] = {ours[0]: ours[0].detach().bfloat16(), ours[2]: ours[2].detach().bfloat16()}
    AdamW(ours, copies=copies, **OPTIONS).step(scale=torch.tensor(0.25, device=device))
    torch.optim.AdamW(theirs, **OPTIONS).step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(copy, parameter.detach().bfloat16()) for parameter, copy in copies.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_all_gradients(device: str, dtype: torch.dtype) -> None:
    grads = [torch.randn(size, device=device).to(dtype) for size in (7, 40_000, 3)]
    holders = [nn.Parameter(torch.empty_like(grad)) for grad in grads]
    for holder, grad in zip(holders, grads, strict=True):
        holder.grad = grad
    expected = torch.cat([grad.double() for grad in grads]).norm()
    for norm in (gradient_norm(holders), gradient_norm([*holders, nn.Parameter(torch.ones(2, device=device))])):
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
    if device == "cpu":
        from armillary.kernels.optimizer.adamw_triton import squares

        torch.testing.assert_close(squares(grads).sum().sqrt().double(), expected, rtol=1e-5, atol=0)


def test_what_it_cannot_step_is_left_to_torch() -> None:
    assert not takes([nn.Parameter(torch.zeros(2))])  # a CPU's
    assert gradient_norm([nn.Parameter(torch.zeros(2))]) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_whoever_keeps_something_made_of_a_weight_sees_that_it_changed(device: str) -> None:
    """By its version, as after torch's own steps; a copy that the step writes is as new as the weight."""
    plain, copied_too = parameters(device)[:2]
    optimizer = AdamW([plain, copied_too], copies={copied_too: copied_too.detach().bfloat16()}, **OPTIONS)
    before = plain._version, copied_too._version
    optimizer.step()
    assert plain._version > before[0] and copied_too._version == before[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_step_that_must_not_be_taken_changes_nothing(device: str, bad: float) -> None:
    ours = parameters(device)
    copies: dict[Tensor, Tensor] = {parameter: parameter.detach().bfloat16() for parameter in ours}
    optimizer = AdamW(ours, copies=copies, **OPTIONS)
    optimizer.step(check=torch.tensor(1.0, device=device))
    before = [[t.clone() for t in (p.detach(), copies[p], *optimizer.state[p].values())] for p in ours]
    assert ours[0].grad is not None
    ours[0].grad[0, 0] = bad
    optimizer.step(scale=torch.tensor(bad, device=device), check=torch.tensor(bad, device=device))
    optimizer.uncount()
    for p, kept in zip(ours, before, strict=True):
        for now, then in zip((p.detach(), copies[p], *optimizer.state[p].values()), kept, strict=True):
            assert torch.equal(now, then)
