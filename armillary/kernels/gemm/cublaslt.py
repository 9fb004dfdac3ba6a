"""GEMMs through cuBLASLt (by ctypes) with a chosen algorithm, and with a matrix added inside the GEMM.

At a GPU's power limit the fastest algorithm is another than the library's heuristic expects, so autotune.py times them;
and torch copies the addend before it multiplies, which the library does not need. The library is the one that torch has
loaded.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# M tokens, N outputs of a linear layer, K inputs

_COMPUTE_32F, _R_32F = 68, 0
_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_TRANS_A, _TRANS_B, _MOST_WORKSPACE = 3, 4, 1
_SCALES, _SCALE_MODES, _FAST_SUMS, _PER_ROW_SCALE = (17, 18), (31, 32), 25, 3
_WORKSPACE_BYTES, _MAX_PROPOSALS = 32 << 20, 16
# settings of an algorithm: the order in which tiles are visited, and an undocumented custom option
_SWIZZLE, _OPTION, _OPTIONS = 4, 5, range(8)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: a proposed algorithm."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class GemmLayout(NamedTuple):
    """A GEMM as the library sees it, column-major: D = op(A)·op(B), each (rows, columns)."""

    a: tuple[int, int]
    b: tuple[int, int]
    d: tuple[int, int]
    trans_a: bool
    trans_b: bool


def gemm_layout(kind: str, M: int, N: int, K: int) -> GemmLayout:
    """'forward' x_MK·w_NKᵀ, 'back' dy_MN·w_NK, 'weight' dy_MNᵀ·x_MK. A row-major matrix is its own transpose in
    column-major order, so A is the second operand of these and B the first."""
    weight = GemmLayout((K, M), (N, M), (K, N), trans_a=False, trans_b=True)
    return {
        "forward": GemmLayout((K, N), (K, M), (N, M), trans_a=True, trans_b=False),
        "back": GemmLayout((K, N), (N, M), (K, M), trans_a=False, trans_b=False),
    }.get(kind, weight)


class CublasLtGemm:
    """One GEMM of one shape, and the algorithms that the library proposes for it, best first. 'sum' is 'weight'
    accumulated into an fp32 result."""

    def __init__(self, kind: str, M: int, N: int, K: int, dtype: torch.dtype) -> None:
        self.lib, self.handle = _library()
        shape = gemm_layout(kind, M, N, K)
        self.out_shape = {"forward": (M, N), "back": (M, K)}.get(kind, (N, K))
        self.out_dtype = torch.float32 if kind == "sum" else dtype
        self.desc = self._create("cublasLtMatmulDescCreate", _COMPUTE_32F, _R_32F)
        self._set(_TRANS_A, ctypes.c_int32(int(shape.trans_a)))
        self._set(_TRANS_B, ctypes.c_int32(int(shape.trans_b)))
        dtypes = (dtype, dtype, self.out_dtype)
        self.layouts = [self._layout(*pair) for pair in zip((shape.a, shape.b, shape.d), dtypes, strict=True)]
        self.proposed = self._proposed()

    def algorithm(self, name: str) -> Any:
        """'2' is the third proposal, '2.6.1' the same with option 6 and swizzle 1; None where there is none."""
        place, *changes = map(int, name.split("."))
        if place >= len(self.proposed):
            return None
        return self._changed(self.proposed[place], *changes) if changes else self.proposed[place]

    def variants(self, name: str) -> list[str]:
        """Names of the other settings of a proposal that the library accepts."""
        names = (f"{name}.{option}.{swizzle}" for option in _OPTIONS for swizzle in (0, 1))
        algorithms = {
            bytes(item.algorithm): variant for variant in names if (item := self.algorithm(variant)) is not None
        }
        algorithms.pop(bytes(self.algorithm(name).algorithm), None)
        return list(algorithms.values())

    def __call__(
        self, first: Tensor, second: Tensor, algorithm: Any, add: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Contiguous operands in `gemm_layout`'s order; `add` is added before the result is rounded, and may be `out`
        itself."""
        out = first.new_empty(self.out_shape, dtype=self.out_dtype) if out is None else out
        stream = torch.cuda.current_stream(first.device).cuda_stream
        a, b, d = self.layouts
        status = self.lib.cublasLtMatmul(
            self.handle,
            self.desc,
            _ONE,
            _at(second),
            a,
            _at(first),
            b,
            _ZERO if add is None else _ONE,
            _at(out if add is None else add),
            d,
            _at(out),
            d,
            ctypes.byref(algorithm.algorithm),
            _at(_workspace(first.device, stream)),
            ctypes.c_size_t(_WORKSPACE_BYTES),
            ctypes.c_void_p(stream),
        )
        _check(status)
        return out

    def _proposed(self) -> list[Any]:
        preference = self._create("cublasLtMatmulPreferenceCreate")
        most = ctypes.c_size_t(_WORKSPACE_BYTES)
        set_most = self.lib.cublasLtMatmulPreferenceSetAttribute
        _check(set_most(preference, _MOST_WORKSPACE, ctypes.byref(most), ctypes.c_size_t(8)))
        proposals, count = (_Heuristic * _MAX_PROPOSALS)(), ctypes.c_int(0)
        a, b, d = self.layouts
        propose = self.lib.cublasLtMatmulAlgoGetHeuristic
        _check(propose(self.handle, self.desc, a, b, d, d, preference, _MAX_PROPOSALS, proposals, ctypes.byref(count)))
        return [item for item in proposals[: count.value] if item.state == 0]

    def _changed(self, proposal: Any, option: int, swizzle: int) -> Any:
        changed, result = _Heuristic(), _Heuristic()
        changed.algorithm = proposal.algorithm
        for name, value in ((_OPTION, option), (_SWIZZLE, swizzle)):
            number = ctypes.c_uint32(value)
            change = self.lib.cublasLtMatmulAlgoConfigSetAttribute
            if change(ctypes.byref(changed.algorithm), name, ctypes.byref(number), ctypes.c_size_t(4)):
                return None
        a, b, d = self.layouts
        check = self.lib.cublasLtMatmulAlgoCheck
        refused = check(self.handle, self.desc, a, b, d, d, ctypes.byref(changed.algorithm), ctypes.byref(result))
        return None if refused or result.state or result.workspace > _WORKSPACE_BYTES else changed

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(self.lib.cublasLtMatmulDescSetAttribute(self.desc, attribute, ctypes.byref(value), size))

    def _layout(self, size: tuple[int, int], dtype: torch.dtype) -> Any:
        rows, columns = size
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        return self._create("cublasLtMatrixLayoutCreate", _TYPES[dtype], *sizes)

    def _create(self, function: str, *arguments: Any) -> Any:
        handle = ctypes.c_void_p()
        _check(getattr(self.lib, function)(ctypes.byref(handle), *arguments))
        return handle


class CublasLtFp8Gemm(CublasLtGemm):
    """a_RS·b_CSᵀ of fp8 operands with per-tensor or per-row scales; the result has another dtype."""

    def __init__(
        self, R: int, C: int, S: int, *, a: torch.dtype, b: torch.dtype, out: torch.dtype, by_row: bool, fast: bool
    ) -> None:
        """`fast` keeps sums in the tensor cores' own, shorter accumulators."""
        self.lib, self.handle = _library()
        self.out_shape, self.out_dtype = (R, C), out
        self.desc = self._create("cublasLtMatmulDescCreate", _COMPUTE_32F, _R_32F)
        self._set(_TRANS_A, ctypes.c_int32(1))
        self._set(_FAST_SUMS, ctypes.c_int8(int(fast)))
        if by_row:
            for mode in _SCALE_MODES:
                self._set(mode, ctypes.c_int32(_PER_ROW_SCALE))
        # the library proposes nothing without pointers to scales
        scales = torch.ones(max(R, C), dtype=torch.float32, device="cuda")
        self._set_scales(scales, scales)
        self.layouts = [self._layout((S, C), b), self._layout((S, R), a), self._layout((C, R), out)]
        self.proposed = self._proposed()

    def scaled(
        self,
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        algorithm: Any,
        add: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """(values, scale) of both; `add` as in `CublasLtGemm`."""
        self._set_scales(a[1], b[1])
        return self(a[0], b[0], algorithm, add, out)

    def _set_scales(self, a_scale: Tensor, b_scale: Tensor) -> None:
        for attribute, scale in zip(_SCALES, (b_scale, a_scale), strict=True):
            self._set(attribute, _at(scale))


_ONE, _ZERO = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@cache
def _library() -> tuple[Any, Any]:
    """The library that torch uses, and a handle of our own."""
    torch.cuda.current_blas_handle()  # torch loads it for its first GEMM
    with open("/proc/self/maps") as maps:
        path = next((line.split()[-1] for line in maps if "libcublasLt.so" in line), None)
    if path is None:
        raise OSError("torch has no cuBLASLt here")
    lib, handle = ctypes.CDLL(path), ctypes.c_void_p()
    _check(lib.cublasLtCreate(ctypes.byref(handle)))
    return lib, handle


@cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """One per stream: GEMMs of two streams may run at once."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")
