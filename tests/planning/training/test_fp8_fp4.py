"""Products in fp8: the planner narrows what the trainer narrows, and counts the passes that each scaling makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.planning.device_model.frameworks import OURS, OURS_BY_LAYER, PHYSICS, Software
from armillary.planning.device_model.vectorised_layouts import PRECISIONS, as_arrays
from armillary.planning.training.explain import explain
from armillary.planning.training.fp8_fp4 import STRIDED, precision_of
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.op_sharding import local_gemm
from armillary.planning.training.search import search
from armillary.planning.training.train_case import TrainCase, lora_of
from armillary.spec.arithmetic.workload import layer_operations, make_batch
from armillary.spec.fp8 import projections, stays_in_bf16
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind, MoE
from armillary.spec.tables.train import TrainJob
from armillary.store.peaks import Peaks, new_peaks
from tests.planning.cases import case_of, small_model

BILLION = small_model(hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=8192, num_layers=16)
NAMES = {
    "qkv": "attention.qkv",
    "out": "attention.out",
    "mlp.gate_up": "mlp.up",
    "mlp.up": "mlp.up",
    "mlp.down": "mlp.down",
}


def narrow(case: TrainCase, layout: Layout, mlp: str = "dense") -> set[str]:
    """Products of a layer that run in fp8."""
    layouts, batch = as_arrays([layout]), make_batch([case.sequence])
    found = set()
    for piece in layer_operations(case.model, LayerKind(mlp=mlp), batch):  # type: ignore[arg-type]
        if piece.forward.kind == "matmul":
            mine = local_gemm(piece.forward, layouts, case.model.moe.num_experts if case.model.moe else 0)
            if PRECISIONS[int(precision_of(case, piece.forward.name, layouts, mine)[0])] == "fp8":
                found.add(piece.forward.name)
    return found


@pytest.mark.parametrize("adapters", [(), ("qkv",), ("out", "down"), ("qkv", "out", "up", "down")])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("ffn", [4096, 4096 + 32, 1000])
def test_the_planner_narrows_what_the_trainer_does(ffn: int, tp: int, adapters: tuple[str, ...]) -> None:
    model, layout = small_model(ffn=ffn), Layout(tp=tp, precision="fp8")
    job = TrainJob(lora_rank=8, lora_on=adapters) if adapters else TrainJob()
    case = case_of(model, "h100x8", software=OURS_BY_LAYER, lora=lora_of(model, job))
    wanted = {one.name for one in projections(model)} - set(stays_in_bf16(model, layout, job))
    assert {NAMES[name] for name in narrow(case, layout)} == wanted


def test_our_experts_stay_in_16_bits_and_others_need_not() -> None:
    moe = MoE(num_experts=8, top_k=2, ffn=4096, shared_ffn=4096)
    model = replace(small_model(), moe=moe, layers=(LayerKind(mlp="moe"),) * 4)
    ours, physics = (case_of(model, "h200", sequences=8, software=one) for one in (OURS_BY_LAYER, PHYSICS))
    layout = Layout(precision="fp8", micro_batch=8)
    assert narrow(ours, layout, "moe") == {"qkv", "out"}
    assert {"moe.gate_up", "moe.down"} <= narrow(physics, layout, "moe")
    wide = predict(ours, as_arrays([replace(layout, precision="bf16")]))
    terms = [{term.name: term.value for term in explain(one)} for one in (predict(ours, as_arrays([layout])), wide)]
    routed = [name for name in terms[0] if "moe." in name]
    assert routed and all(terms[0][name] == terms[1][name] for name in routed)


# --- scales


def seen_on_an_h200() -> Peaks:
    """Ceilings of 2026-11-15, in a burst and lasting."""
    shape = {"m": 8192, "n": 8192, "k": 8192, "seconds": 1.0}
    long = {"dtype": "bf16", "queries": 16384, "keys": 16384, "head_dim": 128, "heads": 16, "causal": True}
    peaks = new_peaks("H200", {}).with_points(
        "gemm",
        [
            shape | {"dtype": "bf16", "flops": 799e12, "sustained_flops": 680e12},
            shape | {"dtype": "fp8", "flops": 1522e12, "sustained_flops": 1281e12},
        ],
    )
    peaks = peaks.with_points(
        "attention",
        [
            long | {"backward": backward, "flops": flops, "seconds": 1.0}
            for backward, flops in ((False, 522e12), (True, 455e12))
        ],
    )
    return peaks.with_points("copy", [{"bytes": 1 << 30, "bytes_per_s": 4.26e12, "seconds": 1.0}])


@pytest.mark.parametrize(("scaling", "measured"), [("token", 0.3126), ("tensor", 0.3273), ("row", 0.3528)])
def test_a_step_in_fp8_on_an_h200(scaling: str, measured: float) -> None:
    """1.14 B parameters, 8 × 4,096 tokens (2026-11-15)."""
    case = case_of(BILLION, "h200", sequences=8, software=OURS, loss_chunk=2048, measured=seen_on_an_h200())
    found = predict(case, as_arrays([Layout(micro_batch=8, precision="fp8", fp8_scaling=scaling)]))  # type: ignore[arg-type]
    assert float(found.time.total[0]) == pytest.approx(measured, rel=0.06)


def memory_bytes(software: Software, scaling: str, **changes: object) -> float:
    """What passes over memory move in a step, casts included."""
    case = case_of(small_model(**changes), "h200", sequences=8, software=software)
    layout = Layout(micro_batch=8, precision="fp8", fp8_scaling=scaling)  # type: ignore[arg-type]
    return float(predict(case, as_arrays([layout])).time.memory[0] * case.curves.bytes_per_s)


def test_each_scaling_is_its_passes() -> None:
    """A look reads what makes an operand once; two forms with scales of their own read it twice, along columns, and no
    rows again. Other software knows per-tensor scales beforehand, and casts per-row ones layer by layer."""
    token, tensor, row = (memory_bytes(OURS, scaling) for scaling in ("token", "tensor", "row"))
    tokens = 8 * 4096 * 8  # of all layers
    reads = 2 * 3 * 1024 + 4 * 4096 + 2 * (2048 + 2 * 1024) + 3 * 8192
    rows = 3 * 1024 + 4096 + 2048 + 2 * 1024 + 8192
    assert tensor - token == pytest.approx(tokens * reads, rel=1e-6)
    assert row - token == pytest.approx(tokens * (STRIDED * 2 * reads - rows), rel=1e-6)
    others = [memory_bytes(PHYSICS, scaling) for scaling in ("token", "tensor", "row")]
    assert others[0] == others[1] < 0.8 * others[2]


def test_layers_by_themselves_cast_their_weights_too() -> None:
    many, few = (memory_bytes(OURS_BY_LAYER, "token", num_layers=n) for n in (8, 4))
    assert many > few
    case = case_of(BILLION, "h200", sequences=8, software=OURS_BY_LAYER)
    layouts = as_arrays([Layout(precision="fp8", fp8_scaling=one) for one in ("token", "tensor", "row")])
    apart = predict(case, layouts).time
    assert (apart.memory[1:] > apart.memory[0]).all(), "a tensor's scale needs a look at every operand, columns' too"
    whole = predict(replace(case, software=OURS), layouts).time
    assert (whole.memory < apart.memory).all() and (whole.optimizer > apart.optimizer).all()


def test_a_search_keeps_the_scaling_it_is_given() -> None:
    case = case_of(small_model(), "h200", sequences=8, software=OURS)
    found = search(case, fixed={"precision": "fp8", "fp8_scaling": "row"})
    assert {found.best.layout(i).fp8_scaling for i in range(len(found.best.layouts))} == {"row"}
    assert as_arrays([Layout(fp8_scaling="tensor")]).layout(0).fp8_scaling == "tensor"
