"""The C++ kernels compiled for ARM and run by QEMU: the references, for every format."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from armillary.kernels.core.agreement import relative_error
from armillary.kernels.native import library
from armillary.kernels.native.packed_weight import PackedWeight, reference
from tests.kernels.native.test_packed_weight import needs_compiler, some_codes

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
UNITS = {"armv8-a": "plain C++", "armv8.2-a+dotprod": "NEON dot products", "armv8.6-a+sve": "NEON dot products"}
TENSORS = ("codes", "scale", "minimum", "super", "super_min")
FIELDS = ("bits", "table", "scales", "minima", "zero", "group", "inputs", "chunk_bytes")
pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(QEMU)),
        reason="no compiler and emulator of ARM (Debian: apt install g++-aarch64-linux-gnu qemu-user)",
    ),
]


def numbers(*values: int) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


def array(tensor: torch.Tensor | None) -> bytes:
    held = b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return numbers(len(held)) + held


def packed_record(weight: PackedWeight, x: torch.Tensor) -> bytes:
    begin = numbers(0, len(x), weight.rows, weight.columns) + array(x)
    fields = numbers(*(getattr(weight.struct, name) for name in FIELDS))
    values = numbers(16) + bytes(weight.struct.values)
    return begin + fields + b"".join(array(weight.tensors.get(name)) for name in TENSORS) + values


def records() -> tuple[bytes, list[torch.Tensor]]:
    """What a file of calls holds, and what each gives by the reference."""
    torch.manual_seed(0)
    written, expected = b"", []
    for codes in some_codes().values():
        weight = PackedWeight.of([codes])
        for tokens in (1, 4, 17):
            x = 3 * torch.randn(tokens, weight.columns)
            written, expected = written + packed_record(weight, x), [*expected, reference(x, codes)]
    for kernel, plain in enumerate((torch.randn(70, 96), torch.randn(70, 96).bfloat16()), start=1):
        x = torch.randn(5, 96)
        written += numbers(kernel, len(x), *plain.shape) + array(x) + array(plain)
        expected.append(F.linear(x, plain.float()))
    return written, expected


@pytest.mark.parametrize("march", UNITS)
def test_arm_gives_the_references(march: str, tmp_path: Path) -> None:
    folder, program = Path(library.__file__).parent, tmp_path / "replay"
    units = [str(folder / f"{unit}.cpp") for unit in library._UNITS]
    flags = [flag for flag in library._FLAGS if flag not in ("-shared", "-fPIC")]
    command = [COMPILER, f"-march={march}", *flags, *units, str(Path(__file__).with_name("replay.cpp")), "-static"]
    subprocess.run([*command, "-o", str(program)], check=True)
    written, expected = records()
    (tmp_path / "calls").write_bytes(written)
    ran = subprocess.run(
        [QEMU, "-cpu", "max", str(program), str(tmp_path / "calls"), str(tmp_path / "answers")],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ran.stdout == UNITS[march]
    answers = torch.from_numpy(np.fromfile(tmp_path / "answers", dtype=np.float32))
    for given, answer in zip(expected, answers.split([each.numel() for each in expected]), strict=True):
        assert relative_error(answer.view_as(given), given) < 1e-5
