"""oneDNN as it was: on ARM without bf16 units, one bf16 GEMM makes torch warn and switch oneDNN off for good.

Everything measured afterwards in that process, fp32 too, would be several times too slow (torch 2.13,
ATen/native/LinearAlgebra.cpp: the check of mkldnn/Matmul.cpp fails, is caught, and oneDNN is switched off).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept() -> Iterator[None]:
    """Around GEMMs in a dtype that the CPU may have no units for: what torch warns of is not passed on, and oneDNN is
    on again afterwards where it was."""
    onednn = torch.backends.mkldnn
    before = onednn.enabled
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*mkldnn.*")
            yield
    finally:
        onednn.enabled = before
