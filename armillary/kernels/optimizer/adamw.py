"""AdamW with one kernel per parameter on a GPU, which also clips the gradient and writes the 16-bit copy.

Its state is torch's (step, exp_avg, exp_avg_sq), so that checkpoints of one can be read by the other.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.requirements import has_triton

# torch keeps AdamW's step count as a tensor


class AdamW(torch.optim.AdamW):
    """torch's AdamW over dense fp32 parameters on one device; `copies` are kept equal to the parameters."""

    def __init__(self, params: Any, *, copies: Mapping[Tensor, Tensor] | None = None, **options: Any) -> None:
        super().__init__(params, foreach=False, fused=False, **options)
        self.copies: Mapping[Tensor, Tensor] = {} if copies is None else copies
        self._counted: list[dict[str, Any]] = []

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, scale: Tensor | None = None, check: Tensor | None = None
    ) -> None:
        """`scale`, a scalar on the device, multiplies every gradient. Where `check`, another scalar, is not finite, the
        device changes nothing: the caller that learns of it on the CPU then calls `uncount`."""
        from armillary.kernels.optimizer.adamw_triton import adamw_

        assert closure is None, "this step runs no closure"
        self._counted = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._state_of(p)
                state["step"] += 1
                self._counted.append(state)
                adamw_(
                    p.detach(),
                    p.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    self.copies.get(p),
                    scale,
                    lr=float(group["lr"]),
                    betas=group["betas"],
                    eps=group["eps"],
                    decay=group["weight_decay"],
                    step=int(state["step"]),
                    check=check,
                )
                if p not in self.copies:  # our kernel does not bump the version counter
                    torch.autograd.graph.increment_version(p)

    def uncount(self) -> None:
        """The last step was not taken: steps are counted on the CPU, which learns that only now."""
        for state in self._counted:
            state["step"] -= 1
        self._counted = []

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        elif state["step"].is_cuda:  # from a checkpoint of torch's fused AdamW: read once, then counted on the CPU
            state["step"] = state["step"].cpu()
        return state


def takes(parameters: Iterable[Tensor]) -> bool:
    """Whether AdamW here can step them: dense fp32 tensors, not shards, on a GPU with triton."""
    return all(
        type(p.data) is Tensor and has_triton(p.device) and p.dtype == torch.float32 and p.is_contiguous()
        for p in parameters
    )


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together, in fp32 on their device; nothing waits for the CPU."""
    grads = [p.grad for p in parameters if p.grad is not None]
    plain = all(grad.is_contiguous() and grad.dtype != torch.float64 and has_triton(grad.device) for grad in grads)
    if grads and plain:
        from armillary.kernels.optimizer.adamw_triton import squares

        return squares(grads).sum().sqrt()
    norms = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
