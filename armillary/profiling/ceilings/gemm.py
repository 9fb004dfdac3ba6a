"""Matrix multiplication per dtype, over squares and over the shapes that language models have.

fp32 runs on the plain multiply-add units (tf32 is switched off), the rest on the matrix units where the device has
them. A point counts 2·m·n·k operations: [m, k] times [k, n]. It is what short bursts reach; what a GPU sustains
is measured for one square.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf, prod
from typing import Any

import torch

from armillary.kernels.core.random_inputs import Pool, random_row, set_elements
from armillary.kernels.core.timing import Call, Timing
from armillary.machine.accelerator import accelerator_of
from armillary.machine.features import has_native
from armillary.profiling.ceilings.settings import Settings
from armillary.profiling.dtypes.probe import onednn_kept
from armillary.spec.precision import EMULATED, UNITS_UNUSED

_TORCH = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_SINCE = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9), "int8": (7, 5)}
"""compute capability from which an NVIDIA GPU has the dtype in hardware"""
_SQUARES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024, 2048)}
_MODEL_SHAPES = {
    "cuda": ((32, 4096, 4096), (512, 4096, 4096), (8192, 6144, 4096), (8192, 28672, 4096), (8192, 4096, 14336)),
    "cpu": ((32, 1024, 1024), (1024, 2304, 768), (1024, 3072, 768), (1024, 768, 3072)),
}
"""(m, n, k): a decode step, a short prompt; QKV, gate + up and down of an 8 B model; smaller ones on a CPU"""
_TIMES_CACHE = 3
_MAX_SETS = 16
_TRIES = 4
_REST_S = 0.1
_SUSTAINED, _SUSTAINED_S, _PLANNED = 8192, 0.6, "bf16"
_TOO_SLOW = 10
"""a shape whose single call takes this many time budgets is left out"""
_SMALL = (64, 256, 256)
"""(m, n, k) on which a dtype without units of its own is timed, and nothing larger: 33 ms at the slowest rate seen"""
_DECODE = (1, 2048, 2048)
"""(m, n, k) of a CPU's decode step: the bytes of the weights count, not the FLOPs"""


def dtypes(device: torch.device) -> list[str]:
    """Those the device computes in and torch multiplies; a CPU has no tf32, and fp8 only emulated."""
    if device.type != "cuda":
        return ["fp32", "bf16", "fp16", "int8"]
    chip = accelerator_of(device)
    if chip is None or chip.vendor != "nvidia":
        return ["fp32", "bf16", "fp16"]
    return [name for name in _TORCH if chip.has_capability(_SINCE.get(name, (0, 0)))]


def cases(settings: Settings) -> list[dict[str, Any]]:
    """Every dtype over every shape, smaller ones first."""
    kind = settings.device.type
    squares = [(size, size, size) for size in _SQUARES[kind]]
    shapes = squares[-3:-1] if settings.quick else sorted((*squares, *_MODEL_SHAPES[kind]), key=prod)
    if not settings.on_cuda:
        shapes = [_DECODE, *shapes]
    return [{"m": m, "n": n, "k": k, "dtype": dtype} for dtype in dtypes(settings.device) for m, n, k in shapes]


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """A point per case, without shapes whose single call would take minutes; an emulated dtype gets one point
    on a small shape, marked so."""
    emulated: dict[str, bool] = {}
    rates: dict[str, float] = {}
    for case in chosen:
        dtype = case["dtype"]
        if dtype not in emulated:
            emulated[dtype] = not settings.on_cuda and is_emulated(dtype, settings)
            if emulated[dtype]:
                yield "gemm", _point(dict(zip("mnk", _SMALL, strict=True)) | {"dtype": dtype}, settings, emulated=True)
        too_slow = _flops(case) > rates.get(dtype, inf) * settings.budget_s * _TOO_SLOW
        if not emulated[dtype] and not too_slow:
            point = _point(case, settings)
            rates[dtype] = max(rates.get(dtype, 0.0), point["flops"])
            yield "gemm", point


def _point(case: dict[str, Any], settings: Settings, **more: Any) -> dict[str, Any]:
    flops, dtype = _flops(case), case["dtype"]
    with precision("tf32" if dtype == "tf32" else "ieee", settings.device), onednn_kept():
        calls = make_calls(case, settings)
        timing = settings.time(*calls, rest_s=_REST_S)
        sustained = _sustained(calls, case, settings)
    more |= {"sustained_flops": flops / sustained.seconds} if sustained else {}
    return settings.point(case, timing, {"flops": flops / timing.seconds}, units=_units(dtype, settings), **more)


def is_emulated(dtype: str, settings: Settings) -> bool:
    """Whether a small GEMM in a narrower dtype takes far longer than in fp32: the CPU has no units for it."""
    if dtype == "fp32":
        return False
    with onednn_kept():
        once_s = _once_s(dtype, settings)
    return once_s * (UNITS_UNUSED if has_native(dtype) else EMULATED) > _once_s("fp32", settings)


def _once_s(dtype: str, settings: Settings) -> float:
    """The quickest of three calls of the small GEMM; the first alone where that took long."""
    call = make_calls(dict(zip("mnk", _SMALL, strict=True)) | {"dtype": dtype}, settings)[0]
    best = inf
    for _ in range(_TRIES):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
        if best > settings.budget_s:
            break
    return best


def _sustained(calls: list[Call], case: dict[str, Any], settings: Settings) -> Timing | None:
    """The same without pauses, once per dtype: matrix units at full load run into the power limit of many GPUs. A quick
    measurement takes it for the dtype that plans need."""
    wanted = settings.on_cuda and {case["m"], case["n"], case["k"]} == {_SUSTAINED}
    skipped = settings.quick and case["dtype"] != _PLANNED
    return settings.time(*calls, budget_s=_SUSTAINED_S) if wanted and not skipped else None


def make_calls(case: dict[str, Any], settings: Settings) -> list[Call]:
    """Enough sets of random matrices that none is still in a cache when it is used next."""
    m, n, k, dtype = case["m"], case["n"], case["k"], _TORCH[case["dtype"]]
    elements = m * k + n * k
    fitting = int(settings.free_bytes / 3 / (elements * dtype.itemsize + 4 * m * n))
    sets = min(_MAX_SETS, fitting, -(-_TIMES_CACHE * settings.cache_bytes // (elements * dtype.itemsize)))
    shapes = [(m, k), (n, k) if case["dtype"] in ("fp8", "int8") else (k, n)]
    row = random_row(set_elements(shapes) * max(1, sets), dtype, settings.device)
    return [_CALLS.get(case["dtype"], _plain)(a, b) for a, b in Pool(row).sets(max(1, sets), shapes)]


def _plain(a: Any, b: Any) -> Call:
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return lambda: torch.mm(a, b, out=out)


def _fp8(a: Any, b: Any) -> Call:
    """e4m3 with one scale per tensor, result in bf16; the second matrix lies transposed, as the units want it."""
    scale = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _int8(a: Any, b: Any) -> Call:
    """Result in int32; the second matrix lies transposed."""
    return lambda: torch._int_mm(a, b.t())


_CALLS: dict[str, Callable[[Any, Any], Call]] = {"fp8": _fp8, "int8": _int8}


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """tf32 on or off for fp32 matrices, and as it was afterwards."""
    if device.type != "cuda":
        yield
        return
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = name
    try:
        yield
    finally:
        backend.fp32_precision = before


def _units(dtype: str, settings: Settings) -> str:
    """The units that run it: on a GPU only fp32 runs on the plain units; a CPU's library decides by itself."""
    return "plain" if dtype == "fp32" else "matrix" if settings.on_cuda else "as the library chooses"


def _flops(case: dict[str, Any]) -> float:
    return 2.0 * float(case["m"] * case["n"] * case["k"])
