"""What a worker process does ahead of the bench: run each version of a case once, so that the compilers' caches on disk
hold what the timing process will ask for."""

from __future__ import annotations

import logging

import torch

from armillary.kernels.needs import lacking
from armillary.kernels.op import Case, Op, Version
from armillary.kernels.ops import find_op
from armillary.kernels.trial import run_once

_COMPILED = ("triton", "compile")


def warm_case(name: str, case: Case) -> None:
    """Compile every version of op `name` that needs a compiler."""
    torch._logging.set_logs(all=logging.ERROR)
    op = find_op(name)
    for version in (*op.versions, *op.rivals):
        if set(_COMPILED) & set(version.needs) and not (lacking(version.needs, case.device) or version.refuses(case)):
            _run_once(op, version, case)
    torch.cuda.empty_cache()


def _run_once(op: Op, version: Version, case: Case) -> None:
    """Forward and backward; what fails here fails again where it is reported."""
    generator = torch.Generator(torch.device(case.device)).manual_seed(0)
    inputs = op.inputs(op.small(case), generator)
    try:
        run_once(version.load(), op, inputs)
    except Exception as error:
        logging.getLogger("armillary.kernels").info("%s %s: %s", op.name, version.name, error)
