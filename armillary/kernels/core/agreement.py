"""Agreement of a version with the reference, forward and backward, on random inputs.

Errors are relative to the reference's norm. The reference runs one format wider (fp32 for half formats, fp64 for fp32)
on the same numbers. Half formats may be off by 2e-2, and by no more than twice what plain torch in the same format is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.dtype import reference_dtype
from armillary.kernels.core.op import Op

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
TIMES_PLAIN = 2.0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Whether a version agrees, and how far off it is."""

    agreed: bool
    """within the tolerance, NaN and infinity in the same places"""
    error: float
    """the largest relative error among outputs and gradients"""
    why_not: str = ""
    """what is off, when it does not agree"""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the reference gives, wide and in the case's own format."""

    inputs: tuple[Any, ...]
    """arguments"""
    grad_outputs: tuple[Tensor | None, ...]
    """random gradients of the outputs"""
    wide: tuple[Tensor | None, ...]
    """outputs and gradients in the wide format"""
    plain: tuple[float, ...]
    """error of plain torch against them"""


def expect(op: Op, inputs: tuple[Any, ...], generator: torch.Generator) -> Expected:
    """Run the reference, wide and plain, on these inputs."""
    outputs = as_tuple(_forward(op.reference, _copied(inputs, op.writes), ()))
    grads = tuple(_random_like(out, generator) if op.grads and out.is_floating_point() else None for out in outputs)
    dtype = reference_dtype(next(x.dtype for x in inputs if isinstance(x, Tensor) and x.is_floating_point()))
    wide_inputs = tuple(to_float(x, dtype) for x in inputs)
    wide = results(op.reference, wide_inputs, tuple(to_float(g, dtype) for g in grads), op.grads, op.writes)
    plain = results(op.reference, inputs, grads, op.grads, op.writes)
    errors = tuple(relative_error(a, b) for a, b in zip(plain, wide, strict=True))
    return Expected(inputs=inputs, grad_outputs=grads, wide=wide, plain=errors)


def check(run: Callable[..., Any], op: Op, expected: Expected, *, tolerance: float | None = None) -> Agreement:
    """Run a version on the same inputs and compare."""
    got = results(run, expected.inputs, expected.grad_outputs, op.grads, op.writes)
    worst, why = 0.0, ""
    for name, mine, wide, plain in zip(_names(op, expected), got, expected.wide, expected.plain, strict=True):
        error = relative_error(mine, wide)
        limit = _limit(mine, plain, tolerance)
        if not error <= limit and not why:
            why = f"{name} is off by {error:.2g}, allowed {limit:.2g}"
        worst = max(worst, error)
    return Agreement(agreed=not why, error=worst, why_not=why)


def results(
    run: Callable[..., Any],
    inputs: tuple[Any, ...],
    grad_outputs: Sequence[Tensor | None],
    grads: tuple[int, ...],
    writes: tuple[int, ...] = (),
) -> tuple[Tensor | None, ...]:
    """Outputs, then the gradients of those inputs that get one; inputs that are written to are copied first."""
    leaves = with_grad(_copied(inputs, writes), grads)
    outputs = as_tuple(_forward(run, leaves, grads))
    wanted = [leaves[i] for i in grads if isinstance(leaves[i], Tensor)]
    plain = tuple(out.detach() for out in outputs)
    if not wanted:
        return plain
    pairs = [(out, g) for out, g in zip(outputs, grad_outputs, strict=True) if g is not None and out.requires_grad]
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return (*plain, *found)


def relative_error(mine: Tensor | None, wide: Tensor | None) -> float:
    """|mine − wide| / |wide|; infinite where one has a NaN or infinity that the other has not."""
    if mine is None or wide is None:
        return 0.0 if mine is wide else float("inf")
    if mine.shape != wide.shape:
        return float("inf")
    if not wide.numel():
        return 0.0
    if not wide.is_floating_point():
        return 0.0 if torch.equal(mine.to(wide.dtype), wide) else float("inf")
    mine = mine.to(wide.dtype)
    finite = torch.isfinite(wide)
    if not bool(finite.all()):
        fits = torch.where(torch.isnan(wide), torch.isnan(mine), mine == wide) | finite
        if not bool(fits.all()):
            return float("inf")
        mine, wide = mine[finite], wide[finite]
    off = float(torch.linalg.vector_norm(mine - wide, dtype=torch.float64))
    size = float(torch.linalg.vector_norm(wide, dtype=torch.float64))
    return off / size if size else off


def with_grad(inputs: tuple[Any, ...], grads: tuple[int, ...]) -> tuple[Any, ...]:
    """The same numbers, as leaves that collect gradients where asked; strides are kept."""
    return tuple(
        x.detach().requires_grad_() if i in grads and isinstance(x, Tensor) else x for i, x in enumerate(inputs)
    )


def _copied(inputs: tuple[Any, ...], writes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if i in writes and isinstance(x, Tensor) else x for i, x in enumerate(inputs))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def to_float(x: Any, dtype: torch.dtype) -> Any:
    """Tensors that hold floats in another format; all else as it is."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _forward(run: Callable[..., Any], inputs: tuple[Any, ...], grads: tuple[int, ...]) -> Any:
    with torch.set_grad_enabled(bool(grads)):
        return run(*inputs)


def _limit(mine: Tensor | None, plain: float, tolerance: float | None) -> float:
    """The usual tolerance of the result's format; a half format may also not be worse than twice plain torch, but is
    never held to more than an fp32 result is."""
    if mine is None or not mine.is_floating_point():
        return 0.0
    if tolerance is not None:
        return tolerance
    usual = TOLERANCES.get(mine.dtype, 2e-2)
    if mine.dtype not in (torch.bfloat16, torch.float16):
        return max(usual, TIMES_PLAIN * plain) if isfinite(plain) else usual
    return min(usual, max(TIMES_PLAIN * plain, TOLERANCES[torch.float32]))


def _random_like(out: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)


def _names(op: Op, expected: Expected) -> list[str]:
    grads = [i for i in op.grads if isinstance(expected.inputs[i], Tensor)]
    num_outputs = len(expected.wide) - len(grads)
    return [*(f"output {i}" for i in range(num_outputs)), *(f"gradient of argument {i}" for i in grads)]
