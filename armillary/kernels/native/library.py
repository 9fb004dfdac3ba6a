"""The C++ kernels of CPUs: compiled for this machine when they are first needed, kept, and loaded with ctypes.

They share torch's OpenMP threads: a second pool would compete with them for the cores. Without a compiler, or where
compiling fails, there are none and plain torch runs instead.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from armillary.errors import ArmillaryError
from armillary.kernels.core.requirements import LOG
from armillary.machine.system_files import cpuinfo_flags
from armillary.store.home import Home

_HEADERS = ("lanes.h", "vector_math.h", "inputs.h", "matrix_units.h")
_UNITS = ("packed_linear", "half_linear", "token_rows", "decode_attention", "shared_sum", "few_rows")
_SOURCES = (*_HEADERS, *(f"{unit}.cpp" for unit in _UNITS))
_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_TIMEOUT_S = 600.0


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None."""
    try:
        return load(build(Home.default().cache / "native"))
    except (OSError, ArmillaryError, subprocess.SubprocessError) as error:
        LOG.warning("no C++ kernels for this CPU, plain torch runs instead: %s", str(error).splitlines()[0])
        return None


def units() -> str:
    """The instructions that the kernels multiply with; 'none' where there are no kernels."""
    kernels = library()
    return "none" if kernels is None else kernels.armillary_units().decode()


def build(folder: Path, *, march: str = "native") -> Path:
    """The compiled kernels in `folder`."""
    return compile_library(folder, Path(__file__).parent, _SOURCES, _FLAGS, march=march, libraries=_openmp())


def compile_library(
    folder: Path,
    here: Path,
    sources: Sequence[str],
    flags: Sequence[str],
    *,
    march: str = "native",
    libraries: Sequence[str] = (),
) -> Path:
    """A library of these files of `here` in `folder`; its name tells sources, compiler and CPU."""
    compiler = _compiler()
    command = [*compiler, f"-march={march}", *flags]
    text = "\n".join(
        [
            *command,
            *(here.joinpath(name).read_text() for name in sources),
            *sorted(cpuinfo_flags()),
            platform.processor(),
        ]
    )
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not path.is_file():
        LOG.info("compiling %s for this CPU, once", sources[-1])
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            compiled = Path(temporary) / path.name
            units = [str(here / name) for name in sources if name.endswith(".cpp")]
            _run([*command, *units, *libraries, "-o", str(compiled)])
            os.replace(compiled, path)
    return path


def _compiler() -> list[str]:
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return [path]
    raise OSError("there is no C++ compiler")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise OSError(f"{Path(command[0]).name} failed: {lines[0]}")


def _openmp() -> list[str]:
    """torch's own OpenMP library, which is already loaded under another name than the system's in torch's wheels."""
    folder = Path(torch.__file__).parent
    paths = sorted([*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")])
    return [str(paths[0])] if paths else []


def load(path: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(path))
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kernels.armillary_units.restype = ctypes.c_char_p
    arguments = {
        "linear": [pointer, pointer, size, pointer, pointer, pointer, size, number],
        "half_linear": [pointer, pointer, size, size, size, pointer, pointer, number],
        "few_rows": [pointer, pointer, size, size, size, pointer, pointer, number],
        "add_norm": [pointer] * 5 + [size, size, ctypes.c_float, number, number],
        "gated_silu": [pointer, pointer, size, number],
        "decode": [pointer, number],
        "qkv_cache": [pointer, number],
    }
    for name, types in arguments.items():
        function = getattr(kernels, f"armillary_{name}")
        function.argtypes, function.restype = types, None
    kernels.armillary_shared_sum.argtypes = [
        *(pointer, size, number, number, size),  # memory, bytes of a part, rank, ranks, number of the call
        *(pointer, pointer, size, number, number, ctypes.c_double),  # x, y, size, width, resumed, patience
    ]
    return kernels
