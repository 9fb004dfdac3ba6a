"""The loops of probes.cpp, compiled for this CPU when they are first needed."""

import ctypes
from functools import cache
from pathlib import Path

from armillary.errors import BadInput
from armillary.kernels.native.library import compile_library
from armillary.store.home import Home

_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-tree-vectorize", "-fno-unroll-loops", "-Wno-psabi")


@cache
def probes() -> ctypes.CDLL:
    """BadInput where there is no C++ compiler."""
    folder = Home.default().cache / "native"
    try:
        path = compile_library(folder, Path(__file__).parent, ("probes.cpp",), _FLAGS)
    except OSError as error:
        raise BadInput(
            f"the loops that measure latencies cannot be compiled: {error}; install g++ or clang++"
        ) from None
    return _typed(ctypes.CDLL(str(path)))


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.armillary_chase.argtypes, library.armillary_chase.restype = [pointer, count, pointer], real
    library.armillary_atomic.argtypes, library.armillary_atomic.restype = [ctypes.c_int, count], real
    library.armillary_hand_over.argtypes, library.armillary_hand_over.restype = [count], real
    library.armillary_barrier.argtypes, library.armillary_barrier.restype = [ctypes.c_int, count], real
    library.armillary_saxpy.argtypes = [ctypes.c_int, ctypes.c_float, pointer, pointer, count, count]
    library.armillary_saxpy.restype = real
    return library
