"""What the planner says of a step that train_one_gpu.py measures, from ceilings measured in the same run.

The question goes through the planner as `armillary plan` asks it; measured ceilings are a large product, in bursts and
in a long row, attention, a copy and launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from armillary.machine.machine import here
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.resolve_recipe import resolve
from armillary.profiling.ceilings import attention_flops as attention
from armillary.profiling.ceilings import bandwidth, gemm
from armillary.profiling.ceilings import launch_latency as launch
from armillary.profiling.ceilings.ceilings import about, name_of
from armillary.profiling.ceilings.settings import settings_for
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe
from armillary.spec.tables.model import ModelTable
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks

SIZE, COPY_BYTES = 8192, 8 << 30


def measure_peaks(home: Home) -> dict[str, float]:
    """Into `home`, where the planner finds them; and in short."""
    device = torch.device("cuda")
    settings = settings_for(device)
    product = {"m": SIZE, "n": SIZE, "k": SIZE}
    found = [
        *gemm.measure([product | {"dtype": dtype} for dtype in ("bf16", "fp8")], settings),
        *attention.measure(attention.cases(settings), settings),
        *bandwidth.measure([{"op": "copy", "bytes": COPY_BYTES, "hot": False}], settings),
        *launch.measure([{"mode": "eager"}], settings),
    ]
    peaks = new_peaks(name_of(device), about(device))
    for kind, point in found:
        peaks = peaks.with_points(kind, [point])
    save_peaks(home, peaks)
    products, narrow, forward, backward, copy, launched = (point for _, point in found)
    return {
        "product_tflops": round(products["flops"] / 1e12),
        "lasting_tflops": round(products["beside"]["sustained_flops"] / 1e12),
        "fp8_tflops": round(narrow["flops"] / 1e12),
        "fp8_lasting_tflops": round(narrow["beside"]["sustained_flops"] / 1e12),
        "attention_tflops": round(forward["flops"] / 1e12),
        "attention_backward_tflops": round(backward["flops"] / 1e12),
        "copy_tb_per_s": round(copy["bytes_per_s"] / 1e12, 2),
        "launch_us": round(launched["seconds"] * 1e6, 1),
    }


def predicted(config: ModelConfig, job: TrainJob, layout: Layout, home: Home) -> dict[str, Any]:
    """Peak of the allocator and step of one device."""
    recipe = Recipe(model=ModelTable(name=config.name), layout=layout, train=job)
    found = predict(resolve(recipe, config, here(), home).case, as_arrays([layout]))
    time = found.time
    terms = {name: float(getattr(time, name)[0]) for name in ("gemm", "attention", "memory", "recompute", "overhead")}
    return {
        "step_ms": 1e3 * float(time.total[0]),
        "peak_gb": float(found.memory.allocated[0]) / 1e9,
        "terms_ms": {name: round(1e3 * value, 1) for name, value in terms.items()},
        "parts_gb": {name: round(size / 1e9, 2) for name, size in found.memory.parts().items()},
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Predicted beside measured, for the rows that have both."""
    lines = ["| | peak GB | predicted | off | step ms | predicted | off |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name, row in rows.items():
        if "predicted" in row and "step_ms" in row:
            said = row["predicted"]
            cells = [
                f"{row[key]:.1f} | {said[key]:.1f} | {100 * (said[key] / row[key] - 1):+.1f} %"
                for key in ("peak_gb", "step_ms")
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines
