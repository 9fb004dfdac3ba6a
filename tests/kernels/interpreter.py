"""Triton's interpreter, mended where triton 3.6 falls short, so that kernels run on a CPU in tests as on a GPU.

Loop bounds are taken by int() of an array with one element, which numpy 2.4 refuses; fp32 is cut off to bf16 instead of
rounded, and rounded to fp8 without a carry into the exponent; a product of bf16 matrices multiplies their bit patterns.
What it looks up anew at every launch, and every call of a function inside one, is looked up once.
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and sys.platform == "linux"
"""triton comes with the dev extra on Linux; tests/conftest.py turns its interpreter on where there is no GPU"""
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED,
    reason="Triton runs on Linux only, and on a GPU machine its kernels are tested by -m gpu",
)


def mend() -> None:
    """Once a process; does no harm where a newer triton is right by itself."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "mended"):
        return
    interpreter.mended = True
    _mend_bounds(interpreter)
    _mend_bf16(interpreter)
    _find_builtins_once(interpreter)
    _patch_once_a_launch(interpreter)


def _patch_once_a_launch(interpreter: Any) -> None:
    tl, old = interpreter.tl, interpreter._patch_lang
    plain = {lang: lang.static_range for lang in (tl, tl.core)}

    @cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if inspect.ismodule(value) and value in plain]

    def patch(function: Any) -> Any:
        found = languages(function)
        inside = bool(found) and all(lang.static_range is not plain[lang] for lang in found)
        return interpreter._LangPatchScope() if inside else old(function)

    interpreter._patch_lang = patch


def _find_builtins_once(interpreter: Any) -> None:
    tl, patch_attr = interpreter.tl, interpreter._patch_attr
    owners = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    builtins = {owner: inspect.getmembers(owner, tl.core.is_builtin) for owner in owners}

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins[owner]:
            if getattr(owner, name) is member:  # else this launch has replaced it already
                patch_attr(owner, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _mend_bounds(interpreter: Any) -> None:
    old = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        old(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _mend_bf16(interpreter: Any) -> None:
    tl, old_convert, builder = interpreter.tl, interpreter._convert_float, interpreter.InterpreterBuilder
    old_dot = builder.create_dot

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            return to_bf16(data)
        if source == tl.float32 and target in (tl.float8e4nv, tl.float8e5):
            return to_fp8(data, "float8_e4m3fn" if target == tl.float8e4nv else "float8_e5m2")
        if (source, target) == (tl.bfloat16, tl.float32):
            return from_bf16(data).view(np.uint32)
        return old_convert(data, source, target, rounding)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(from_bf16(handle.data), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return old_dot(self, widened(a), widened(b), *rest)

    interpreter._convert_float = convert
    builder.create_dot = dot


def to_bf16(data: Any) -> Any:
    """Bits of the nearest bf16, ties to even, of fp32 numbers."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


def to_fp8(data: Any, name: str) -> Any:
    """Bits of the nearest fp8 number, ties to even, as torch rounds."""
    import torch

    numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
    return numbers.to(getattr(torch, name)).view(torch.uint8).numpy()


def from_bf16(data: Any) -> Any:
    """fp32 numbers of bf16 bits."""
    return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


if INTERPRETED:
    mend()
