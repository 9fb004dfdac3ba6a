"""An optimiser over more tensors than torch writes shapes of is still modelled, from what the recording says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from armillary.profiling.record.trace_recorder import TraceRecorder
from armillary.profiling.trace.event_classes import OPTIMIZERS
from armillary.profiling.trace.kineto import fill_lists
from armillary.profiling.trace.read_trace import read_trace
from armillary.profiling.work.work import op_of
from tests.profiling.traces import HandMade

LISTS = {OPTIMIZERS: [{"weights": 3000, "dtype": "c10::BFloat16"}, {"weights": 1000, "dtype": "c10::BFloat16"}]}
MANY = "TensorList"


def test_a_fused_optimiser_reads_four_lists_and_writes_three(tmp_path: Path) -> None:
    made = HandMade().step(100)
    made.add(
        "cpu_op",
        "aten::_fused_adamw_",
        0,
        50,
        **{
            "Input Dims": [[]] * 7,
            "Input type": [MANY] * 6 + ["Scalar"],
            "Concrete Inputs": [""] * 6 + ["0.1"],
        },
    )
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**LISTS, "traceEvents": made.events}))
    trace = read_trace(path)
    op = op_of("aten::_fused_adamw_", trace.signatures[0])
    assert op is not None and op.bytes == 2000 * 2 * (4 + 3) and op.kind == "optimizer"


def test_lists_that_are_written_out_keep_their_shapes_and_get_a_type() -> None:
    shapes, kinds = [[[32, 64], [32]], []], [MANY, "Scalar"]
    typed = fill_lists("aten::_foreach_mul_", shapes, kinds, ["", "2"], LISTS)
    assert typed == (shapes, [f"{MANY} c10::BFloat16", "Scalar"])
    mixed = {OPTIMIZERS: [*LISTS[OPTIMIZERS], {"weights": 8, "dtype": "float"}]}
    assert fill_lists("aten::_foreach_mul_", shapes, kinds, ["", "2"], mixed) == (shapes, kinds)


def test_step_counts_stay() -> None:
    counts = ([[], []], [MANY, "Scalar"])
    assert fill_lists("aten::_foreach_add_", *counts, ["", "1"], LISTS) == counts
    assert fill_lists("aten::_foreach_mul_", *counts, ["", "2"], {}) == counts
    filled = fill_lists("aten::_foreach_lerp_", [[], [], []], [MANY, MANY, "Scalar"], ["", "", "0.1"], LISTS)
    assert filled == ([[[2000]], [[2000]], []], [f"{MANY} c10::BFloat16"] * 2 + ["Scalar"])


@pytest.mark.parametrize("groups", [1, 2])
def test_the_recording_counts_weights_with_gradients(tmp_path: Path, groups: int) -> None:
    layers = [nn.Linear(8, 8) for _ in range(40)]
    halves = [layers[i::groups] for i in range(groups)]
    optimizer = torch.optim.AdamW([{"params": [p for layer in half for p in layer.parameters()]} for half in halves])
    sum(layer(torch.ones(1, 8)).sum() for layer in layers).backward()
    recorder = TraceRecorder(memory=False, stacks=False)
    recorder.start()
    recorder.begin_step()
    optimizer.step()
    recorder.end_step()
    recorder.stop()
    lists = json.loads(recorder.save(tmp_path / "t.json").read_text())[OPTIMIZERS]
    assert [entry["weights"] for entry in lists] == [40 * 72 // groups] * groups and lists[0]["dtype"] == "float"
