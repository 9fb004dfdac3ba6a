"""Agreement of a version with the reference, forward and backward, on random inputs.

Errors are relative to the reference's norm. The reference runs on the same numbers in a wider dtype (fp32 for 16-bit
dtypes, fp64 for fp32). A 16-bit result may be off by 2e-2, and by at most twice the error of plain torch in the same
dtype.
"""

from collections.abc import Callable, Iterable, Sequence
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
    """Whether a version agrees with the reference, and its error."""

    agreed: bool  # within the tolerance, NaN and infinity in the same places
    error: float  # the largest relative error among outputs and gradients
    why_not: str = ""  # the first output or gradient that is off


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The reference's results for one set of inputs."""

    inputs: tuple[Any, ...]
    grad_outputs: tuple[Tensor | None, ...]  # random gradients of the outputs
    wide: tuple[Tensor | None, ...]  # outputs and gradients in the wider dtype
    plain: tuple[float, ...]  # their errors in the case's own dtype


def expect(op: Op, inputs: tuple[Any, ...], generator: torch.Generator) -> Expected:
    """Run the reference on these inputs, in a wider dtype and in their own."""
    with torch.no_grad():
        outputs = as_tuple(op.reference(*_copied(inputs, op.writes)))
    grads = tuple(
        torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
        if op.grads and out.is_floating_point()
        else None
        for out in outputs
    )
    dtype = reference_dtype(next(x.dtype for x in inputs if isinstance(x, Tensor) and x.is_floating_point()))
    wide_inputs = tuple(_to_float(x, dtype) for x in inputs)
    wide = results(op.reference, wide_inputs, tuple(_to_float(g, dtype) for g in grads), op.grads, op.writes)
    plain = results(op.reference, inputs, grads, op.grads, op.writes)
    errors = tuple(relative_error(a, b) for a, b in zip(plain, wide, strict=True))
    return Expected(inputs=inputs, grad_outputs=grads, wide=wide, plain=errors)


def check(run: Callable[..., Any], op: Op, expected: Expected, *, tolerance: float | None = None) -> Agreement:
    """Run a version on the same inputs and compare."""
    outputs = results(run, expected.inputs, expected.grad_outputs, op.grads, op.writes)
    worst, why = 0.0, ""
    for name, result, wide, plain in zip(_names(op, expected), outputs, expected.wide, expected.plain, strict=True):
        error = relative_error(result, wide)
        limit = _limit(result, plain, tolerance)
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
    """Outputs, then the gradients of the inputs `grads`; inputs that are written to are copied first."""
    leaves = with_grad(_copied(inputs, writes), grads)
    with torch.set_grad_enabled(bool(grads)):
        outputs = as_tuple(run(*leaves))
    return (*(out.detach() for out in outputs), *gradients(leaves, outputs, grad_outputs, grads))


def gradients(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], grad_outputs: Iterable[Tensor | None], grads: tuple[int, ...]
) -> tuple[Tensor | None, ...]:
    """Of the inputs `grads` that are tensors, by a backward pass from the outputs that have a gradient."""
    wanted = [inputs[i] for i in grads if isinstance(inputs[i], Tensor)]
    if not wanted:
        return ()
    roots = [(out, g) for out, g in zip(outputs, grad_outputs, strict=True) if g is not None and out.requires_grad]
    return torch.autograd.grad([out for out, _ in roots], wanted, [g for _, g in roots], allow_unused=True)


def relative_error(result: Tensor | None, wide: Tensor | None) -> float:
    """|result − wide| / |wide|; infinite where one has a NaN or infinity that the other has not."""
    if result is None or wide is None:
        return 0.0 if result is wide else float("inf")
    if result.shape != wide.shape:
        return float("inf")
    if not wide.numel():
        return 0.0
    if not wide.is_floating_point():
        return 0.0 if torch.equal(result.to(wide.dtype), wide) else float("inf")
    result, wide = result.detach().to(wide.dtype), wide.detach()
    finite = torch.isfinite(wide)
    if not bool(finite.all()):
        same = torch.where(torch.isnan(wide), torch.isnan(result), result == wide) | finite
        if not bool(same.all()):
            return float("inf")
        result, wide = result[finite], wide[finite]
    error = float(torch.linalg.vector_norm(result - wide, dtype=torch.float64))
    norm = float(torch.linalg.vector_norm(wide, dtype=torch.float64))
    return error / norm if norm else error


def with_grad(inputs: tuple[Any, ...], grads: tuple[int, ...]) -> tuple[Any, ...]:
    """The same inputs, those of `grads` as leaves that collect gradients; strides are kept."""
    return tuple(
        x.detach().requires_grad_() if i in grads and isinstance(x, Tensor) else x for i, x in enumerate(inputs)
    )


def _copied(inputs: tuple[Any, ...], writes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if i in writes and isinstance(x, Tensor) else x for i, x in enumerate(inputs))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _to_float(x: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in another dtype; everything else unchanged."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):  # a NamedTuple of weights
        return type(x)(*(_to_float(each, dtype) for each in x))
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _limit(result: Tensor | None, plain: float, tolerance: float | None) -> float:
    """The tolerance of the result's dtype; a 16-bit result may also be at most twice as far off as plain torch, but is
    never held to more than an fp32 result is."""
    if result is None or not result.is_floating_point():
        return 0.0
    if tolerance is not None:
        return tolerance
    usual = TOLERANCES.get(result.dtype, 2e-2)
    if result.dtype not in (torch.bfloat16, torch.float16):
        return max(usual, TIMES_PLAIN * plain) if isfinite(plain) else usual
    return min(usual, max(TIMES_PLAIN * plain, TOLERANCES[torch.float32]))


def _names(op: Op, expected: Expected) -> list[str]:
    grads = [i for i in op.grads if isinstance(expected.inputs[i], Tensor)]
    num_outputs = len(expected.wide) - len(grads)
    return [*(f"output {i}" for i in range(num_outputs)), *(f"gradient of argument {i}" for i in grads)]
