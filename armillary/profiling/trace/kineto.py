"""torch-profiler (Kineto) events as columns.

Every version since 2021 is read: categories and argument names changed over time, and AMD, Intel and MTIA builds use
names of their own. torch writes a list of more than thirty tensors as []: where the recording says how many weights the
optimisers step, such a list is replaced by one tensor with that many elements (the mean, where there are several
parameter groups).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from armillary.profiling.trace.chrome_json import ChromeTrace
from armillary.profiling.trace.event_classes import OPTIMIZERS
from armillary.profiling.trace.trace import ANNOTATION, KERNEL, MEMCPY, MEMSET, OP, PYTHON, RUNTIME, Trace, TraceBuilder

CATEGORIES = {
    "cpu_op": OP,
    "operator": OP,
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "runtime": RUNTIME,
    "hip_runtime": RUNTIME,
    "xpu_runtime": RUNTIME,
    "xpu_driver": RUNTIME,
    "mtia_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME,
    "kernel": KERNEL,
    "gpu_memcpy": MEMCPY,
    "memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "memset": MEMSET,
    "mtia_ccp_events": KERNEL,
    "concurrent_kernel": KERNEL,
    "privateuse1_kernel": KERNEL,
}
_WITH_NUMBERS = (
    "aten::conv",
    "aten::_conv",
    "aten::scaled_dot",
    "aten::_scaled_dot",
    "aten::_flash",
    "aten::_efficient",
    "aten::sum",
    "aten::mean",
    "aten::randn",
    "aten::rand",
    "aten::zeros",
    "aten::ones",
    "aten::full",
    "aten::empty",
    "flash_attn",
    "aten::embedding_dense",
    "aten::repeat",
    "aten::expand",
    "aten::index",
    "aten::_embedding_bag",
    "aten::_cudnn_attention",
    "aten::max_pool",
    "aten::avg_pool",
    "aten::_adaptive",
    "aten::upsample",
    "aten::_upsample",
    "aten::_index_put",
    "torch_attn",
    "mkldnn::",
    "aiter::fmha",
    "armillary::",
)
"""operators whose scalar arguments (stride, causal, dims …) a model of their work needs"""
_DETAILS = {
    "grid": "grid",
    "block": "block",
    "registers per thread": "registers",
    "shared memory": "shared_bytes",
    "est. achieved occupancy %": "occupancy_percent",
    "warps per SM": "warps_per_sm",
}


_LATEST_US = 1e17
"""year 5138"""
_FUSED_LISTS = {"adam": 4, "adamw": 4, "sgd": 3, "adagrad": 3, "lamb": 4}
"""weights, gradients and states of a fused optimiser; the step counts, one number per tensor, are left out"""


def read(path: Path, *, gzipped: bool) -> Trace:
    file = ChromeTrace(path, gzipped)
    builder = TraceBuilder(source=str(path))
    origin: float | None = None
    for event in file:
        if origin is None and _is_time(event.get("ts")):
            origin = float(int(event["ts"]))
        _take(builder, event, origin or 0.0, file.about)
    devices = sorted((d for d in _list(file.about.get("deviceProperties"))), key=lambda d: int(d.get("id", 0)))
    job = file.about.get("distributedInfo")
    world = job.get("world_size", 1) if isinstance(job, dict) else 1
    return builder.finish(
        devices=tuple(str(d.get("name", "")) for d in devices),
        device_bytes=tuple(float(d.get("totalGlobalMem", 0)) for d in devices),
        world=world if isinstance(world, int) else 1,
    )


def _take(builder: TraceBuilder, event: dict[str, Any], origin: float, about: dict[str, Any]) -> None:
    phase = event.get("ph")
    if phase == "X":
        category = event.get("cat")
        kind = CATEGORIES.get(category.lower()) if isinstance(category, str) else None
        start, length = event.get("ts"), event.get("dur", 0)
        if kind is not None and _is_time(start) and _is_time(length):
            _keep(builder, kind, event, (start - origin) * 1e-6, max(length, 0) * 1e-6, about)
    elif phase == "i" and event.get("name") == "[memory]":
        _keep_memory(builder, event, origin)


def _keep(
    builder: TraceBuilder, kind: int, event: dict[str, Any], start: float, seconds: float, about: dict[str, Any]
) -> None:
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    name = str(event.get("name", ""))
    thread = f"{event.get('pid')}/{event.get('tid')}"
    if kind == PYTHON:
        builder.add(kind, name, start, seconds, thread)
    elif kind in (OP, ANNOTATION):
        builder.add(
            _kind_of(kind, name),
            name,
            start,
            seconds,
            thread,
            external=_integer(args, "External id"),
            sequence=_integer(args, "Sequence number"),
            signature=_signature(builder, name, args, about),
            detail=_context(builder, args),
        )
    elif kind == RUNTIME:
        builder.add(
            kind,
            name,
            start,
            seconds,
            thread,
            correlation=_integer(args, "correlation"),
            external=_integer(args, "External id"),
        )
    else:
        device = _integer(args, "device")
        device = device if device >= 0 else event["pid"] if isinstance(event.get("pid"), int) else 0
        stream = args.get("stream", event.get("tid"))
        builder.add(
            kind,
            name,
            start,
            seconds,
            f"{device}/{stream}",
            device=device % 32768,
            correlation=_integer(args, "correlation"),
            external=_integer(args, "External id"),
            detail=_detail(builder, args),
            size=float(_integer(args, "bytes")),
        )


def _kind_of(kind: int, name: str) -> int:
    """Compiled regions are marked by annotations, but they are code that runs, as an operator is."""
    compiled = kind == ANNOTATION and ("CompiledFxGraph" in name or name.startswith("Torch-Compiled Region"))
    return OP if compiled else kind


def _keep_memory(builder: TraceBuilder, event: dict[str, Any], origin: float) -> None:
    args = event.get("args")
    if not isinstance(args, dict) or not _is_time(event.get("ts")):
        return
    on_host = _integer(args, "Device Type") <= 0
    address = args.get("Addr", 0)
    builder.add_memory(
        (float(event["ts"]) - origin) * 1e-6,
        _integer(args, "Bytes", 0),
        _integer(args, "Total Allocated", 0),
        address & (2**63 - 1) if isinstance(address, int) else 0,
        -1 if on_host else max(_integer(args, "Device Id"), 0),
        f"{event.get('pid')}/{event.get('tid')}",
    )


def _signature(builder: TraceBuilder, name: str, args: dict[str, Any], about: dict[str, Any]) -> int:
    dims = args.get("Input Dims") or args.get("Input dims")
    if not isinstance(dims, list) or not dims:
        return -1
    types = args.get("Input type")
    types = types if isinstance(types, list) else []
    if about and "TensorList" in types:
        dims, types = fill_lists(name, dims, types, args.get("Concrete Inputs") or [], about)
    numbers = args.get("Concrete Inputs") if name.startswith(_WITH_NUMBERS) else []
    numbers = numbers if isinstance(numbers, list) else []
    strides = _expanded(args.get("Input Strides"))
    return builder.intern_signature((str(dims), str(types), str(numbers), str(strides)), dims, types, numbers, strides)


def _expanded(strides: Any) -> list[Any]:
    """Strides where one is 0, so that less is read than the shape says; else nothing, which keeps signatures few."""
    some = isinstance(strides, list) and any(isinstance(steps, list) and 0 in steps for steps in strides)
    return strides if some else []


def _context(builder: TraceBuilder, args: dict[str, Any]) -> int:
    """Call stack and module, as traces of 2021 to 2022 carry them."""
    stack, module = args.get("Call stack"), args.get("Module Hierarchy")
    if not stack and not module:
        return -1
    return builder.intern_detail((stack, module), {"stack": stack or "", "module": module or ""})


def _detail(builder: TraceBuilder, args: dict[str, Any]) -> int:
    detail = {ours: args[theirs] for theirs, ours in _DETAILS.items() if theirs in args}
    return builder.intern_detail(str(detail), detail) if detail else -1


def _integer(args: dict[str, Any], key: str, default: int = -1) -> int:
    value = args.get(key, default)
    return value if isinstance(value, int) and -(2**62) < value < 2**62 else default


def _is_time(value: Any) -> TypeGuard[float]:
    """A number of microseconds: neither text, NaN nor beyond any clock."""
    return isinstance(value, (int, float)) and -_LATEST_US < value < _LATEST_US


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


# --- long lists of tensors


def fill_lists(
    name: str, dims: list[Any], types: list[Any], numbers: list[Any], about: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    """`dims` and `types` with the lists filled in, or unchanged."""
    base, lists = name.removeprefix("aten::"), about.get(OPTIMIZERS)
    if not lists or not base.startswith(("_foreach_", "_fused_")) or "TensorList" not in types:
        return dims, types
    if any(shape for shape, kind in zip(dims, types, strict=False) if kind == "TensorList"):
        return dims, _typed(types, lists)  # short enough to be written out
    if base == "_foreach_add_" and numbers[-1:] in (["1"], ["1."]):
        return dims, types  # the counts of steps
    weights = sum(int(entry["weights"]) for entry in lists) // len(lists)
    kind = f"TensorList {lists[0]['dtype']}"
    fused = _FUSED_LISTS.get(base.strip("_").removeprefix("fused_"))
    if fused:
        return [[[weights]]] * fused, [kind] * fused
    filled = [[[weights]] if each == "TensorList" else shape for shape, each in zip(dims, types, strict=False)]
    return filled, [kind if each == "TensorList" else each for each in types]


def _typed(types: list[Any], lists: list[Mapping[str, Any]]) -> list[Any]:
    """Lists with what they hold, where all weights have one type."""
    if len({entry["dtype"] for entry in lists}) > 1:
        return types
    return [f"TensorList {lists[0]['dtype']}" if each == "TensorList" else each for each in types]
