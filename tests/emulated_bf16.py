"""bf16 matrix products on any CPU, where bf16 is the point of a test.

On ARM without bf16 units torch tries oneDNN for them, warns that it failed (aten/src/ATen/native/LinearAlgebra.cpp,
addmm_impl_cpu_), and switches oneDNN off for the whole process: fp32 tests that follow would be slower. Without oneDNN
from the start there is neither; the small products of tests take no longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def any_cpu() -> Iterator[None]:
    """Around bf16 products, backward passes included. (torch's own `mkldnn.flags` warns of settings of other chips.)"""
    onednn = torch.backends.mkldnn
    before, onednn.enabled = onednn.enabled, False
    try:
        yield
    finally:
        onednn.enabled = before
