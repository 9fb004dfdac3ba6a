"""One question for every kernel test: does this version agree with the reference on this case?"""

from __future__ import annotations

from typing import Any

import torch

from armillary.kernels.core.agreement import check, expect
from armillary.kernels.core.op import Case, Op


def assert_agrees(op: Op, case: Case, version: str = "triton", inputs: tuple[Any, ...] | None = None) -> None:
    """Forward and backward, at the usual tolerances, on the case's random inputs or on these."""
    generator = torch.Generator(torch.device(case.device)).manual_seed(0)
    expected = expect(op, op.inputs(case, generator) if inputs is None else inputs, generator)
    found = check(loaded(op, version), op, expected, tolerance=op.tolerance.get(case.dtype))
    assert found.agreed, f"{op.name} {case}: {found.why_not}"


def loaded(op: Op, version: str = "triton") -> Any:
    """The version's function."""
    chosen = op.version(version)
    assert chosen is not None
    return chosen.load()
