"""Linear layers of an engine on a CPU: the form that this CPU is fastest with, of packed and of plain weights."""

from functools import partial

from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.linear.linear_formats import (
    Int8Units,
    PackedDense,
    few_rows_linear,
    half_linear,
    int8_linear,
    packs,
    replace_head,
    replace_linears,
    run_int8,
    share_row_max,
)
from armillary.engine.runner.linear.native_linear import run_native, run_native_tokens
from armillary.engine.runner.linear.packed_cpu import run_integers
from armillary.engine.runner.rank_layout import RankLayout
from armillary.model.device import free_bytes
from armillary.model.quantized.packed_linear import packed_modules
from armillary.parallel.collectives import all_reduce
from armillary.spec.tables.serve import Serve

_SPARE = 0.25  # fraction of free memory that a second copy of the weights may take


def fit_cpu(executor: FastExecutor, serve: Serve, ranks: RankLayout | None, *, let_go: bool) -> None:
    """GEMMs in the form a CPU is fastest with: int8 where asked for, else bf16 packed once; packed int8 and int4 in
    the order of their kernels."""
    forward = executor.forward
    can_pack = packs(next(forward.model.parameters()))
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in forward.model.parameters())
    packed = partial(PackedDense, plain=weight_bytes < (free_bytes(executor.device) or 0) * _SPARE)
    if can_pack and serve.weights != "int8":
        replace_head(forward, packed, let_go=let_go)
    packed_model = bool(packed_modules(forward.model))
    units = Int8Units(native=True, fast=True)
    if serve.weights == "int8" or packed_model:
        units = Int8Units.here() if ranks is None else Int8Units.of_all(ranks.world)
    run_native(forward, let_go=let_go, per_token=units.native)
    if serve.weights == "int8" or packed_model:
        run_native_tokens(forward)
    if packed_model and not can_pack and let_go and forward.model.output is not None:
        replace_head(forward, half_linear, let_go=let_go)
    run_int8(forward, units, let_go=let_go)
    run_integers(forward, let_go=let_go)
    if serve.weights == "int8":
        in_int8 = partial(int8_linear, units=units)
        replace_linears(forward, in_int8, let_go=let_go)
        replace_head(forward, in_int8, let_go=let_go)
    elif can_pack:
        replace_linears(forward, packed, let_go=let_go)
    else:
        replace_linears(forward, few_rows_linear, let_go=False)
        if not packed_model:
            replace_head(forward, few_rows_linear, let_go=False)
    if ranks is not None and ranks.tp.size > 1:
        tp = ranks.tp
        share_row_max(forward, lambda most: all_reduce(most, tp, "max"))
