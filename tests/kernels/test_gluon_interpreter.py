"""The interpreter of Gluon kernels finds what it is for: waits that are missing and barriers that nobody completes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import gluon_interpreter
from tests.kernels.gluon_interpreter import gluon_on_cpu
from tests.kernels.interpreter import needs_interpreter

pytestmark = needs_interpreter


def doubled(fault: str) -> torch.Tensor:
    """16 rows of ones, times two by a product, through shared memory in two parts; with this fault planted."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tests.kernels.gluon_doubling import FAULTS, double_kernel

    x, weight, y = torch.ones(16, 16), 2 * torch.eye(16), torch.zeros(16, 16)
    layout = gl.NVMMASharedLayout.get_default_for([8, 16], gl.float32)
    descriptors = [TensorDescriptor.from_tensor(each, [8, 16], layout) for each in (x, weight, y)]
    with gluon_on_cpu():
        double_kernel[(1,)](*descriptors, FAULT=FAULTS.index(fault))
    return y


def test_a_sound_kernel_is_right() -> None:
    assert torch.equal(doubled("none"), torch.full((16, 16), 2.0))


@pytest.mark.parametrize("fault", ["copy not waited for", "buffer used too early", "store not waited for"])
def test_a_missing_wait_is_a_wrong_result(fault: str) -> None:
    """Of several runs, since partitions are threads."""
    assert not all(torch.equal(doubled(fault), torch.full((16, 16), 2.0)) for _ in range(10))


@pytest.mark.parametrize(("fault", "said"), [("no arrival", "nobody"), ("arrives twice", "more arrivals")])
def test_a_wrong_count_of_arrivals_is_told(fault: str, said: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(gluon_interpreter, "PATIENCE_S", 0.2)
    with pytest.raises(AssertionError, match=said):
        doubled(fault)
