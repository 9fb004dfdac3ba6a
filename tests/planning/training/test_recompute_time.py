"""Full recompute repeats a layer's forward pass, but for its last GEMM where torch stops early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from armillary.planning.device_model.frameworks import PHYSICS
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.step_time import step_time
from armillary.spec.layout import Layout
from tests.planning.cases import case_of


def test_stopping_early_saves_the_last_gemm_of_every_layer() -> None:
    case = case_of("llama-3-8b", "h100x8", sequences=8)
    layouts = as_arrays([Layout(dp=8, zero=3, recompute="full")])
    whole, early = (
        step_time(replace(case, software=replace(PHYSICS, stops_early=stops)), layouts) for stops in (False, True)
    )
    down = early.work.layer.last_projection * early.work.micro_batches * case.model.num_layers
    assert whole.recompute[0] - early.recompute[0] == pytest.approx(float(down[0]))
    assert 0.15 < down[0] / whole.recompute[0] < 0.35  # a quarter of a Llama layer's weights


def test_a_norm_behind_the_mlp_reads_its_result() -> None:
    case = case_of("llama-3-8b", "h100x8", sequences=8)
    case = replace(case, model=replace(case.model, norm_at="both"))
    assert step_time(case, as_arrays([Layout(dp=8, zero=3)])).work.layer.last_projection[0] == 0


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("reentrant", "products"), [(False, 1 + 4), (True, 2 + 4)])
def test_torch_itself_stops_early(reentrant: bool, products: int) -> None:
    up, down = torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 8, bias=False)
    tokens_TH = torch.randn(4, 8, requires_grad=True)
    out = checkpoint(lambda x: x + down(torch.relu(up(x))), tokens_TH, use_reentrant=reentrant)
    assert isinstance(out, torch.Tensor)
    with Products() as counted:
        out.sum().backward()
    assert counted.count == products  # of the forward pass again, and two of each in the backward pass
