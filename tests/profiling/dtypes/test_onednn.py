"""oneDNN stays on after a look at a dtype that made torch switch it off, as ARM without bf16 units does."""

from __future__ import annotations

import warnings

import torch

from armillary.profiling.dtypes.probe import onednn_kept


def test_it_is_as_before_and_the_warning_is_not_passed_on() -> None:
    before = torch.backends.mkldnn.enabled
    with onednn_kept():
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: needs a cpu with bf16 support", stacklevel=1)
        torch.backends.mkldnn.enabled = False
    assert torch.backends.mkldnn.enabled is before
