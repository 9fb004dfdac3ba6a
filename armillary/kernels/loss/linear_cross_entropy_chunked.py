"""Linear + cross-entropy in chunks of tokens: loss, dX and dW from three GEMMs, in bounded memory.

The loss is a scalar, so its gradient is known up to one factor as soon as a chunk's logits exist: the forward pass
replaces them by softmax - onehot in place, multiplies that into dX and dW, and the backward pass only scales. A chunk
has as many tokens as fit the memory that dW and its fp32 sum need anyway, because each chunk reads and writes that sum
once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.requirements import has_triton, interpreted
from armillary.kernels.gemm.gemm import accumulate_

# M tokens, H hidden, V vocabulary, m tokens of a chunk

SPARE_BYTES = 1_400_000_000  # scratch memory beyond dX, dW and one fp32 dW


def chunked(
    x_MH: Tensor,
    weight_VH: Tensor,
    targets_M: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """linear_cross_entropy.reference by chunks; gradients are computed only where they are required."""
    x, targets = x_MH.flatten(0, -2), targets_M.flatten().contiguous()
    grad = torch.is_grad_enabled()
    total, _, _ = _loss(
        x,
        weight_VH,
        targets,
        ignore_index,
        softcap,
        scale,
        grad and x.requires_grad,
        grad and weight_VH.requires_grad,
        SPARE_BYTES,
    )
    if reduction == "sum":
        return total
    count = (targets != ignore_index).sum()
    # as in torch: without a target that counts, the loss is NaN without a gradient
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


# --- the op: the summed loss, and its gradients up to the factor from the backward pass


@torch.library.custom_op(
    "armillary::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, int ignore_index, float softcap, float scale, bool grad_x,"
    " bool grad_w, int spare_bytes) -> (Tensor, Tensor, Tensor)",
)
def _loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    softcap: float,
    scale: float,
    grad_x: bool,
    grad_w: bool,
    spare_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    loss, dx, dw = _empty_loss(x, weight, targets, ignore_index, softcap, scale, grad_x, grad_w, spare_bytes)
    rows = _chunk_rows(x, weight, grad_w, spare_bytes)
    losses_M = loss.new_empty(len(x))
    if not len(x):
        return losses_M.sum(), dx, dw.zero_()
    parts = _aligned_parts(len(weight))
    # rows begin on multiples of 16 elements: odd vocabularies are several times slower otherwise
    logits_mV = torch.empty(rows, -(-len(weight) // 16) * 16, dtype=x.dtype, device=x.device)[:, : len(weight)]
    for begin in range(0, len(x), rows):
        chunk = slice(begin, min(begin + rows, len(x)))
        z = logits_mV[: chunk.stop - begin]
        for part in parts:
            torch.mm(x[chunk], weight[part].t(), out=z[:, part])
        _to_gradient_(z, targets[chunk], losses_M[chunk], ignore_index, softcap, scale, write=grad_x or grad_w)
        for part in parts:
            if grad_x:
                accumulate_(dx[chunk], z[:, part], weight[part], first=part.start == 0)
            if grad_w:
                accumulate_(dw[part], z[:, part].t(), x[chunk], first=begin == 0)
    return losses_M.sum(), dx, dw


@_loss.register_fake
def _empty_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    softcap: float,
    scale: float,
    grad_x: bool,
    grad_w: bool,
    spare_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    many = len(x) > _chunk_rows(x, weight, grad_w, spare_bytes)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if grad_x else x.new_empty(0)
    dw = weight.new_empty(weight.shape if grad_w else (0,), dtype=_sum_dtype(weight, many))
    return x.new_empty((), dtype=wide), dx, dw


def _setup_context(ctx, inputs, output) -> None:
    _, weight, _, _, _, _, ctx.grad_x, ctx.grad_w, _ = inputs
    _, dx, dw = output
    ctx.weight_dtype = weight.dtype
    ctx.mark_non_differentiable(dx, dw)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dx, dw)


def _backward(ctx, g, _dx, _dw):
    dx, dw = ctx.saved_tensors
    dx = _scaled(dx, g, dx.dtype) if ctx.grad_x and g is not None else None
    dw = _scaled(dw, g, ctx.weight_dtype) if ctx.grad_w and g is not None else None
    return dx, dw, None, None, None, None, None, None, None


_loss.register_autograd(_backward, setup_context=_setup_context)


def _sum_dtype(weight: Tensor, many: bool) -> torch.dtype:
    """Several chunks are summed in fp32; one chunk needs no sum, but in fp16 it could overflow before it is scaled."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return wide if many or weight.dtype == torch.float16 else weight.dtype


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor, rounded once, without a wide copy where it matters."""
    if has_triton(x.device) and x.dtype != torch.float64:
        from armillary.kernels.loss.linear_cross_entropy_triton import scaled

        return scaled(x, factor, dtype)
    return (x.to(factor.dtype) * factor).to(dtype)


def _chunk_rows(x: Tensor, weight: Tensor, grad_w: bool, spare_bytes: int) -> int:
    """Tokens per chunk: its logits may take the place of dW, which exists only afterwards, and `spare_bytes`."""
    allowed = spare_bytes + (weight.numel() * weight.element_size() if grad_w else 0)
    most = max(1, allowed // (len(weight) * x.element_size()))
    most = most // 128 * 128 or most
    chunks = -(-len(x) // most)
    even = -(-len(x) // max(chunks, 1))
    return max(1, min(most, -(-even // 128) * 128, len(x)))


def _aligned_parts(vocab: int) -> list[slice]:
    """The whole vocabulary; where it is no multiple of 8, most of it and the few rows left over, because libraries have
    fast GEMMs for aligned sizes only."""
    most = vocab if vocab % 8 == 0 else vocab // 64 * 64
    return [part for part in (slice(0, most), slice(most, vocab)) if part.stop > part.start]


# --- a chunk of logits becomes its gradient


def _to_gradient_(
    z: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, softcap: float, scale: float, *, write: bool
) -> None:
    """Write the losses; `write` also replaces the logits by d loss / d logits, in place."""
    if z.dtype != torch.float64 and (has_triton(z.device) or interpreted()):
        from armillary.kernels.loss.linear_cross_entropy_triton import to_gradient_

        to_gradient_(z, targets, losses, ignore_index, softcap, scale, write=write)
        return
    capped = z.to(losses.dtype) * scale
    capped = softcap * torch.tanh(capped / softcap) if softcap else capped
    log_p = capped.log_softmax(-1)
    losses.copy_(F.nll_loss(log_p, targets, ignore_index=ignore_index, reduction="none"))
    if not write:
        return
    counts = targets != ignore_index
    dz = log_p.exp_()
    dz.scatter_add_(1, targets.where(counts, 0)[:, None], dz.new_full((len(z), 1), -1.0))
    dz *= scale * (1 - (capped / softcap).square()) if softcap else scale
    z.copy_(dz.masked_fill_(~counts[:, None], 0.0))
