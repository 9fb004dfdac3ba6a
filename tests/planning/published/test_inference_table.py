"""Published inference measurements: a fixture of 40 rows is predicted within the stated errors."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput
from armillary.planning.published.inference_row import config_id, inference_row
from armillary.planning.published.inference_table import (
    InferencePrediction,
    is_inference_table,
    predict_row,
    predict_rows,
)
from armillary.planning.published.names import find_chip, find_model
from armillary.planning.published.row_case import is_fitted_on
from armillary.planning.published.table import evaluate_table
from armillary.planning.published.throughput_benchmark import captured_sizes, max_load
from armillary.planning.serving.engines import MOST_PARAMETERS, Engine, engine_for, engines, physics, rates_for
from armillary.planning.serving.generation import offline
from armillary.planning.serving.serving_memory import sequence_bytes

FIXTURE = Path(__file__).parent / "published_inference_40.csv"
UNSEEN = Path(__file__).parents[3] / "benchmarks" / "unseen_inference.csv"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


ROWS = read(FIXTURE)


def row(**changes: str) -> dict[str, str]:
    base = {
        "model": "Llama-3.1-8B",
        "gpu": "H100-80GB-SXM",
        "n_gpus": "1",
        "tp": "1",
        "precision": "bf16",
        "engine": "vLLM",
        "input_len": "1000",
        "output_len": "100",
        "concurrency_or_batch": "1",
        "measured_itl_ms": "6.5",
    }
    return base | changes


def mean_error(found: list[InferencePrediction]) -> float:
    return mean(abs(one.error) for one in found if one.error is not None)


def quoted(found: list[InferencePrediction], kind: str, engine: str) -> list[InferencePrediction]:
    return [one for one in found if one.kind == kind and one.framework == engine and not one.fitted]


# --- accuracy


def test_the_fixture_is_predicted_within_fifteen_percent_on_the_half_not_fitted() -> None:
    found = predict_rows(ROWS)
    static, single = quoted(found, "static batch", "TensorRT-LLM"), quoted(found, "batch 1", "gpt-fast")
    assert len(static) == 16 and len(single) == 8
    assert mean_error(static) <= 0.15 and mean_error(single) <= 0.15


def test_physics_alone_stays_near() -> None:
    found = predict_rows(ROWS, physics_only=True)
    assert mean_error(quoted(found, "static batch", "TensorRT-LLM")) <= 0.35
    assert mean_error(quoted(found, "batch 1", "gpt-fast")) <= 0.25


def test_every_row_is_predicted_or_says_why() -> None:
    predictions = predict_rows(ROWS)
    assert sum(prediction.error is not None for prediction in predictions) >= 0.95 * len(predictions)
    assert all(prediction.error is not None or prediction.reason for prediction in predictions)


# --- reading rows


def test_kinds_of_measurement() -> None:
    kinds = {one.kind for one in predict_rows(ROWS) if one.kind}
    assert {"static batch", "batch 1", "first token", "max load", "closed loop", "prefill only", "decode only"} >= kinds
    assert len(kinds) >= 6


def test_rows_that_cannot_be_predicted_say_why() -> None:
    for changes, reason in (
        ({"model": "GPT-9 3B"}, "no model 'GPT-9 3B' in the catalogue"),
        ({"gpu": "Abacus"}, "no chip 'Abacus' in the catalogue"),
        ({"gpu": "DGX Spark (GB10)"}, "no peak of .* is published"),
        ({"precision": "ternary"}, "precision 'ternary' is not known"),
        ({"n_gpus": ""}, "no number of devices"),
        ({"tp": "wide-EP"}, "tp 'wide-EP' is not a number"),
        ({"input_len": ""}, "no input length"),
        ({"concurrency_or_batch": ""}, "no batch or concurrency"),
        ({"model": "NVIDIA-Nemotron-3-Nano-30B"}, "is not a plain transformer"),
    ):
        with pytest.raises(BadInput, match=reason):
            inference_row(row(**changes))
        assert predict_row(row(**changes)).reason, "listed, not lost"
    assert predict_row(row(measured_itl_ms="")).reason == "nothing measured"


def test_the_error_is_of_the_first_figure_published() -> None:
    both = predict_row(row(measured_tokens_per_s="150", measured_ttft_ms="30"))
    assert both.gauge == "tokens_out_per_s" and predict_row(row()).gauge == "itl_s"
    assert both.error == pytest.approx(both.predicted["tokens_out_per_s"] / 150 - 1)


def test_config_ids_tell_the_halves_apart() -> None:
    one = row()
    assert config_id(one) == config_id({**one, "note": "another", "measured_itl_ms": "7"}), "no part of it"
    assert config_id(one) != config_id(row(input_len="1001"))
    assert is_fitted_on("b927a2e") and not is_fitted_on("fc6c2cb3")
    assert 8 < sum(is_fitted_on(config_id(one)) for one in ROWS) < 32


def test_formats_a_chip_cannot_compute_in_are_only_stored() -> None:
    ampere = inference_row(row(gpu="A100-80GB-SXM", precision="FP8")).replica.dtypes
    hopper = inference_row(row(precision="FP8 weights+KV")).replica.dtypes
    assert (ampere.weights, ampere.compute) == ("fp8", "bf16") and (hopper.compute, hopper.kv) == ("fp8", "fp8")
    assert inference_row(row(precision="int4 g32")).replica.dtypes.weights == "int4"


def test_cuts_from_columns_and_notes() -> None:
    assert inference_row(row(n_gpus="8", tp="8")).replica.split.tp == 8
    assert inference_row(row(n_gpus="4", tp="1", note="TP1 PP4; offline")).replica.split.pp == 4
    moe = {"model": "DeepSeek-V3", "n_gpus": "32", "tp": "EP32"}
    assert inference_row(row(**moe)).replica.split.ep == 32
    cores = inference_row(row(gpu="Trainium1 (trn1.32xlarge)", n_gpus="16", tp="32")).replica
    assert cores.split.tp == 32 and cores.cluster.chip.memory_bytes_per_s == 440e9, "each core half a chip"


def test_tensorrt_llm_runs_experts_with_attention_data_parallelism() -> None:
    """Its pages say so for all models with experts, its tables for one."""
    rows = {
        "model": "Llama 4 Scout",
        "n_gpus": "4",
        "tp": "4",
        "concurrency_or_batch": "max load",
        "output_len": "2000",
    }
    new = inference_row(row(**rows, engine="TensorRT-LLM 1.0 (PyTorch backend)", precision="FP8")).replica
    assert (new.split.tp, new.split.ep, new.dispatch) == (1, 4, "all-gather")
    other = inference_row(row(**rows, engine="vLLM", precision="FP8")).replica
    assert (other.split.tp, other.split.ep, other.dispatch) == (4, 1, "all-to-all")
    long = 22_000
    assert sequence_bytes(new, long) > sequence_bytes(replace(new, keeps_chunks=False), long)


def test_a_benchmark_of_padding_reaches_the_same_experts_with_every_token() -> None:
    padding = inference_row(row(model="Mixtral 8x7B", engine="TensorRT-LLM 0.9", note="static batch")).replica
    assert padding.same_tokens
    varied = replace(padding, same_tokens=False)
    assert padding.decode(64, 500).experts_s < 0.5 * varied.decode(64, 500).experts_s
    dense = inference_row(row(engine="TensorRT-LLM 0.9")).replica
    assert dense.decode(64, 500) == replace(dense, same_tokens=False).decode(64, 500)


def test_decode_steps_are_padded_to_the_captured_batch_sizes() -> None:
    """trtllm-bench rounds the largest batch up and captures it too: 560 sequences run as 640, 1,100 in 2 stages too."""
    assert captured_sizes(560, 1)[-2:] == (512, 640) and captured_sizes(1100, 2)[-1] == 640
    assert captured_sizes(9000, 1)[-1] == 4096 and captured_sizes(3, 1)[-1] == 64
    one = inference_row(row()).replica
    plain, padded = (offline(one, 300, 65, 100, 20, captured) for captured in ((), (64, 128)))
    full = offline(one, 300, 128, 100, 20)
    assert full.itl_s > padded.itl_s > plain.itl_s, "rows that only fill a graph have no keys to read"
    assert offline(one, 300, 64, 100, 20, (64, 128)).itl_s == offline(one, 300, 64, 100, 20).itl_s


def test_maximum_load_is_what_the_engine_runs_by_itself() -> None:
    h100, a100 = find_chip("H100"), find_chip("A100-80GB-SXM")
    assert h100 is not None and a100 is not None
    large, small = (max_load("vLLM 0.11.0", "", 2000, chip) for chip in (h100, a100))
    assert (large.most_running, large.chunk) == (1024, 8192) and (small.most_running, small.chunk) == (256, 2048)
    assert max_load("vLLM 0.6.3", "", 2000, h100).most_running == 256
    assert max_load("TensorRT-LLM 1.0", "", 256, h100).requests == 30_000
    stated = max_load("vLLM", "1,500 requests; at most 64 requests run", 2000, h100)
    assert (stated.requests, stated.most_running) == (1500, 64)


def test_fewer_requests_run_where_a_row_says_so() -> None:
    load = {"concurrency_or_batch": "max load", "measured_itl_ms": "", "measured_tokens_per_s": "5000"}
    all_of_them, eight = (predict_row(row(**load, note=note)) for note in ("", "at most 8 requests run"))
    assert eight.predicted["tokens_out_per_s"] < all_of_them.predicted["tokens_out_per_s"] / 3


def test_a_model_that_no_catalogue_has_is_built_from_its_dimensions() -> None:
    sizes = {"layers": "40", "hidden": "5120", "heads": "40", "ffn": "20480", "vocab": "50272", "params_b": "12.9"}
    assert inference_row(row(model="OPT 13B", **sizes)).replica.config.num_layers == 40
    assert "fill them in" in predict_row(row(model="OPT 13B")).reason


def test_rows_of_sources_that_nobody_had_looked_at_stay_within_the_stated_error() -> None:
    """benchmarks/planning_inference.md tells what was learnt from them."""
    found = evaluate_table(UNSEEN, ["complete"]).summary
    assert found["rows"] == 108 and found["mape"] <= 0.23 and found["median"] <= 0.17


def test_a_table_is_known_by_its_columns() -> None:
    assert is_inference_table(ROWS[0]) and not is_inference_table(["model", "seq_len"])


CELLS = st.sampled_from(
    [
        "",
        "0",
        "-3",
        "nan",
        "inf",
        "1e30",
        "7",
        "4096",
        "EP8",
        "max load",
        "FP8",
        "bf16",
        "DEP0",
        "TP4 PP4",
        "(",
        "H100-80GB-SXM",
        "Llama-3.1-8B",
        "Mixtral 8x7B",
        "DGX Spark (GB10)",
        "x" * 99,
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*row(), "note", "params_b"]), CELLS, max_size=4))
def test_no_row_breaks_the_table(changes: dict[str, str]) -> None:
    found = predict_row(row(**changes))
    assert bool(found.reason) != (found.error is not None)
    assert found.error is None or found.error >= -1


# --- names


@pytest.mark.parametrize(
    ("text", "params_b", "name"),
    [
        ("LLaMA 70B", None, "llama-2-70b"),
        ("Llama 3.3 70B", 70.6, "llama-3.3-70b"),
        ("GPT-J 6B", 6.05, "gpt-j-6b"),
        ("meta-llama/Llama-3.1-8B-Instruct", None, "llama-3.1-8b"),
        ("Qwen/QwQ-32B", 32.8, "qwen2.5-32b"),
        ("Mistral-7B-Instruct-v0.2", None, "mistral-7b-v0.2"),
        ("DeepSeek R1 0528", 671.0, "deepseek-v3"),
        ("Mixtral-8x7B", 46.7, "mixtral-8x7b"),
        ("Llama-v3.1 405B", None, "llama-3.1-405b"),
        ("CodeLlama-34B", 34.0, "codellama-34b"),
        ("Qwen3 235B A22B", 235.0, "qwen3-235b-a22b"),
        ("meta-llama/Meta-Llama-3-8B", None, "llama-3-8b"),
        ("deepseek-ai/DeepSeek-V3-0324", None, "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-v0.1", None, "mixtral-8x7b"),
    ],
)
def test_models_by_the_names_tables_give_them(text: str, params_b: float | None, name: str) -> None:
    found = find_model(text, params_b)
    assert found is not None and found.name == name


def test_no_model_is_better_than_a_wrong_one() -> None:
    assert find_model("Nemotron 340B", 340) is None
    assert find_model("Llama-2-7B", 13.0) is None, "the parameters contradict the name"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-80GB (330W limit, hybrid cube mesh)", "a100-80gb-sxm"),
        ("MI250X (one GCD)", "mi250x-gcd"),
        ("Inferentia2 (Inf2.48xlarge)", "inferentia2"),
        ("RTX PRO 6000 Blackwell SE", "rtx-pro-6000"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100-80GB-PCIe", "h100-pcie"),
        ("DGX Spark (GB10)", "gb10"),
        ("DGX-H100", "h100-sxm"),
        ("8 x NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100x8", "h100-sxm"),
        ("AMD Instinct MI300X", "mi300x"),
        ("GB200 NVL72", "gb200"),
        ("DGX-GB300", "gb300"),
        ("TPU v5p-128", "tpu-v5p"),
        ("Intel Gaudi 3", "gaudi3"),
        ("p5.48xlarge", "h100-sxm"),
        ("A800-80GB", "a100-80gb-sxm"),
    ],
)
def test_chips_by_the_names_tables_give_them(text: str, name: str) -> None:
    found = find_chip(text)
    assert found is not None and found.name == name


# --- engines


def test_engines_declare_at_most_two_parameters_with_their_provenance() -> None:
    for engine in engines().values():
        assert 1 <= len(engine.parameters) <= MOST_PARAMETERS
        assert engine.source and engine.date and "benchmarks" in engine.command
    with pytest.raises(BadInput, match="declares 3 parameters; keep 2"):
        Engine(
            name="x",
            match=(),
            parameters=dict.fromkeys(("kv", "link", "grouped"), 1.0),
            source="",
            date="",
            command="",
        )


def test_engines_by_the_names_tables_give_them() -> None:
    assert engine_for("TensorRT-LLM 0.9") == engines()["tensorrt-llm"]
    assert engine_for("TensorRT-LLM 1.0 (PyTorch backend)") is None, "other kernels: physics alone"
    assert rates_for("SGLang") == physics() and rates_for("gpt-fast (torch.compile)") != physics()


@pytest.mark.parametrize(
    ("engine", "note", "waits"),
    [
        ("vLLM", "", True),
        ("vLLM 0.10.1", "", True),
        ("vLLM 0.11.0", "async scheduling", False),
        ("vLLM 0.14.0", "", False),
        ("SGLang 0.5", "", False),
    ],
)
def test_older_releases_of_vllm_spend_host_time_on_every_running_request(engine: str, note: str, waits: bool) -> None:
    text = {"engine": engine, "note": note, "concurrency_or_batch": "256"}
    some, more = (inference_row(row(**text)).replica.decode(rows, 1000).host_s for rows in (1, 256))
    assert more - some == pytest.approx(255 * rates_for("vLLM before 0.14").row_s if waits else 0.0)


def test_an_unknown_parameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(Exception, match="no rate 'memory_rat'; did you mean memory_rate"):
        Engine(name="x", match=(), parameters={"memory_rat": 1.0}, source="", date="", command="")
