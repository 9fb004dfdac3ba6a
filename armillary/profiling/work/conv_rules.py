"""Rules for convolutions, plain and transposed, and for what changes an image's size: pooling and upsampling."""

from collections.abc import Callable
from math import prod

from armillary.profiling.trace.op_call import Call, NoModel
from armillary.spec.arithmetic import ops
from armillary.spec.arithmetic.ops import INDEX_BYTES, Op


def conv(
    stride: int = 3, padding: int = 4, dilation: int = 5, groups: int = 8, transposed: int = 6
) -> Callable[[Call], Op]:
    """Places of the numbers among the arguments, after input, weight and bias."""

    def rule(call: Call) -> Op:
        x, w = call.tensor(0), call.tensor(1)
        steps, pads, gaps, parts = (call.numbers(i) for i in (stride, padding, dilation, groups))
        if not steps:
            raise NoModel
        if transposed >= 0 and call.flag(transposed):
            return _transposed(call, steps, pads or (0,), gaps or (1,), parts[0] if parts else 1)
        shape = ops.Conv(
            batch=x.shape[0],
            channels_in=x.shape[1],
            channels_out=w.shape[0],
            size=x.shape[2:],
            kernel=w.shape[2:],
            stride=steps,
            padding=pads or (0,),
            dilation=gaps or (1,),
            groups=parts[0] if parts else 1,
        )
        return ops.conv(call.name, shape, dtype=x.dtype)

    return rule


def _transposed(
    call: Call, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> Op:
    """Every input meets every tap of the channels_out / groups filters, which the weight's shape [in, out/groups, …]
    says; the result is (size − 1)·stride − 2·padding + dilation·(kernel − 1) + 1 per dim."""
    x, w = call.tensor(0), call.tensor(1)
    rank = len(x.shape) - 2
    step, pad, gap = (v * rank if len(v) == 1 else v for v in (stride, padding, dilation))
    sizes = [(x.shape[2 + i] - 1) * step[i] - 2 * pad[i] + gap[i] * (w.shape[2 + i] - 1) + 1 for i in range(rank)]
    out = x.shape[0] * w.shape[1] * groups * prod(sizes)
    return call.op("conv", 2 * x.count * prod(w.shape[1:]), x.bytes + w.bytes, out * x.size)


def conv_backward(call: Call) -> Op:
    """Gradients of input and weight: the weight's shape says channels_in / groups, so stride and padding are not
    needed. Of a transposed one, input and result change places."""
    dy, x, w = (call.tensor(i) for i in range(3))
    transposed = call.flag(7) if len(call.concrete) > 7 else dy.shape[1] != w.shape[0]
    wanted = call.concrete[-1].strip("[]() ").split(",")[:2] if call.concrete else []
    gemms = max(1, sum("True" in flag for flag in wanted)) if wanted and wanted[0] else 2
    flops = gemms * 2 * (x.count if transposed else dy.count) * prod(w.shape[1:])
    return call.op("conv", flops, gemms * dy.bytes + x.bytes + w.bytes, w.bytes + (gemms - 1) * x.bytes)


def pool(*, indices: bool = False) -> Callable[[Call], Op]:
    """Windows `kernel` (argument 1) every `stride` (2, else the kernel): one result each, plus its index for max."""

    def rule(call: Call) -> Op:
        x = call.tensor(0)
        kernel, stride = call.numbers(1), call.numbers(2)
        if not kernel:
            raise NoModel
        steps = stride or kernel
        each = prod(steps) if len(steps) > 1 else steps[0] ** len(kernel)
        written = x.count / each * (x.size + (INDEX_BYTES if indices else 0))
        return call.op("elementwise", x.count, x.bytes, written)

    return rule


def pool_backward(*, indices: bool = False) -> Callable[[Call], Op]:
    """(gradient of the result, input, …): as many bytes as the input has are written."""

    def rule(call: Call) -> Op:
        dy, x = call.tensor(0), call.tensor(1)
        read = dy.bytes + (dy.count * INDEX_BYTES if indices else 0)
        return call.op("elementwise", x.count, read, x.full_bytes)

    return rule


def resized(call: Call) -> Op:
    """Argument 1 is the size of the result: adaptive pooling, upsampling."""
    x, size = call.tensor(0), call.numbers(1)
    if not size or min(size) < 0:
        raise NoModel
    out = x.count / prod(x.shape[-len(size) :]) * prod(size)
    return call.op("elementwise", max(out, x.count), x.bytes, out * x.size)
