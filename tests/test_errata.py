"""docs/errata.md: every right figure is recomputed from catalogue and formulas, every copied one is reproduced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.planning.cost.storage import checkpoint_bytes
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec import catalogue
from armillary.spec.arithmetic.mfu import model_flops_per_token
from armillary.spec.arithmetic.ops import matmul
from armillary.spec.arithmetic.params import kv_bytes_per_token, parameters
from armillary.spec.model import ModelConfig

PAGE = (Path(__file__).parent.parent / "docs" / "errata.md").read_text()
ROWS = {
    cells[0]: cells
    for line in PAGE.splitlines()
    if line.startswith("| ") and (cells := [cell.strip() for cell in line.strip("|").split(" | ")])[0] != "figure"
}


def config(name: str) -> ModelConfig:
    return catalogue.model(name).config


def tera(value: float | None, digits: int = 0) -> str:
    assert value is not None
    return f"{value / 1e12:,.{digits}f} TFLOP/s"


def giga(value: float | None, unit: str) -> str:
    assert value is not None
    return f"{value / 1e9:,.0f} {unit}"


def peaks(chip: str, dtype: str, digits: int = 0) -> Callable[[], tuple[str, str]]:
    found = catalogue.chip(chip)
    return lambda: (tera(found.sparse_flops[dtype], digits), tera(found.flops[dtype], digits))


def scaling() -> tuple[str, str]:
    gained = speedup(0.95, 8)
    return f"{8 / gained:.1%}".replace("%", " %"), f"{gained / 8:.1%}".replace("%", " %")


def llama_kv() -> tuple[str, str]:
    model = config("llama-3-8b")
    return f"{2 * model.num_layers * model.hidden * 2:,} B", f"{kv_bytes_per_token(model):,} B"


def latent_kv() -> tuple[str, str]:
    model = config("deepseek-v3")
    return f"{2 * model.num_layers * model.heads * 128 * 2:,} B", f"{kv_bytes_per_token(model):,} B"


def training_flops() -> tuple[str, str]:
    model = config("llama-3-8b")
    return f"{6 * parameters(model).total / 1e9:.1f} GFLOP", f"{model_flops_per_token(model, 8192) / 1e9:.1f} GFLOP"


def mma() -> tuple[str, str]:
    return f"{16 * 8 * 16:,} FLOPs", f"{matmul('', 16, 8, 16, dtype='bf16').flops:,.0f} FLOPs"


def checkpoint() -> tuple[str, str]:
    model = config("llama-3-70b")
    return giga(checkpoint_bytes(model, optimizer=False), "GB"), giga(checkpoint_bytes(model), "GB")


FIGURES: dict[str, Callable[[], tuple[str, str]]] = {
    "H100 SXM, bf16": peaks("h100-sxm", "bf16"),
    "H100 SXM, fp8": peaks("h100-sxm", "fp8"),
    "L4, fp16": peaks("l4", "fp16"),
    "RTX A6000, fp16": peaks("rtx-a6000", "fp16", 1),
    "MI300X, fp16": peaks("mi300x", "fp16"),
    "B200, fp8": peaks("b200", "fp8"),
    "H200, memory": lambda: ("144 GB, 192 GB", giga(catalogue.chip("h200").memory_bytes, "GB")),
    "NVLink 4, per GPU": lambda: ("900 GB/s", giga(catalogue.link("nvlink-4").bytes_per_s, "GB/s")),
    "InfiniBand NDR, per port": lambda: ("400 GB/s", giga(catalogue.link("ib-ndr").bytes_per_s, "GB/s")),
    "PCIe 5 x16": lambda: ("128 GB/s", giga(catalogue.link("pcie5-x16").bytes_per_s, "GB/s")),
    "Llama 3 70B, checkpoint to resume from": checkpoint,
    "Llama 3 8B, KV cache per token": llama_kv,
    "DeepSeek-V3, KV cache per token": latent_kv,
    "Mixtral 8x7B, parameters": lambda: ("56 B", f"{parameters(config('mixtral-8x7b')).total / 1e9:.1f} B"),
    "Llama 3 8B, training FLOPs per token at 8,192": training_flops,
    "one `mma.m16n8k16`": mma,
    "scaling efficiency of 95 % parallel work on 8 devices": scaling,
}


def test_every_row_is_recomputed() -> None:
    assert set(ROWS) == set(FIGURES) and len(ROWS) >= 8


@pytest.mark.parametrize("name", FIGURES)
def test_the_right_figure_is_ours_and_the_copied_one_is_not(name: str) -> None:
    copied, right = FIGURES[name]()
    assert ROWS[name][1:3] == [copied, right] and copied != right
    assert ROWS[name][4].strip("| "), "a source"


def test_the_active_parameters_of_mixtral() -> None:
    assert f"{parameters(config('mixtral-8x7b')).active / 1e9:.1f} B" in ROWS["Mixtral 8x7B, parameters"][3]
