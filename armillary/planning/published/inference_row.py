"""A row of published inference measurements as a replica and its requests; stated rules fill in what it leaves out.

Rules: no output length means 200 tokens (gpt-fast's default); tp beyond the number of chips counts cores, each an equal
share of its chip; FP8 and FP4 engines have an fp8 KV cache, others 16 bits; dtypes that a chip cannot compute in are
only stored; GPT-OSS weights have 4 bits whatever is stated; 'max load' is a queue of requests, of which as many run at
once as the KV cache holds and the engine allows (throughput_benchmark.py); DEPn and attention-DP shard the experts; an
engine called decode receives its prompts from a prefill pool.

TensorRT-LLM's tables leave out what their pages and sources say (read on 2026-11-19). Its PyTorch backend (1.x) runs
experts with attention data-parallelism, one expert rank per chip, and gathers every row on every rank
(perf-overview.md; fused_moe_cutlass.py); it frees no keys of chunked layers, and keeps those of GPT-OSS in 16 bits on
Hopper. Its earlier benchmark (gptSessionBenchmark.cpp of 0.x) fills every prompt with padding, so that all tokens go
to the same experts.
"""

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Literal

from armillary.errors import BadInput
from armillary.planning.published.names import find_model
from armillary.planning.published.row_case import Row, chip_of, chip_part, limited_chip, model_of
from armillary.planning.published.throughput_benchmark import MaxLoad, max_load, release
from armillary.planning.serving.deployment_options import serving_dtypes
from armillary.planning.serving.engines import physics, rates_for
from armillary.planning.serving.forward_ops import ServingDtypes, Split
from armillary.planning.serving.replica import Replica
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster, Tier

Workload = Literal["static batch", "batch 1", "first token", "max load", "closed loop", "prefill only", "decode only"]

_IDENTITY = ("engine", "model", "gpu", "n_gpus", "tp", "precision", "input_len", "output_len", "concurrency_or_batch")
_DEFAULT_OUT = 200
_LARGEST = 1e9
"""above every plausible count or length"""
_FORMATS = (
    ("fp8", "fp8"),
    ("fp4", "fp4"),
    ("int8", "int8"),
    ("int4", "int4"),
    ("bf16", "bf16"),
    ("fp16", "bf16"),
    ("float16", "bf16"),
    ("bfloat16", "bf16"),
)
_NOT_TRANSFORMERS = ("nemotron-3", "nemotron-h", "mamba", "jamba")


@dataclass(frozen=True, kw_only=True)
class InferenceRow:
    """One measured configuration, ready to be predicted."""

    replica: Replica
    kind: Workload
    batch: int
    """concurrent requests; 0: as many as fit"""
    tokens_in: int
    tokens_out: int
    load: MaxLoad | None = None
    """how the engine runs a queue, for max load"""


def config_id(row: Row) -> str:
    """The row's config_id, or eight hex digits of what identifies a configuration; the last digit separates rows of the
    fit from held-out rows."""
    if row.get("config_id"):
        return row["config_id"]
    text = "|".join((row.get(key) or "").strip() for key in _IDENTITY)
    return hashlib.sha1(text.encode()).hexdigest()[:8]


def inference_row(row: Row, *, physics_only: bool = False) -> InferenceRow:
    """Read a row; BadInput says why one cannot be predicted."""
    name = row.get("model", "")
    if any(part in name.lower() for part in _NOT_TRANSFORMERS):
        raise BadInput(f"{name} is not a plain transformer")
    config = find_model(name, positive(row, "params_b")) or model_of(row)
    split, devices = _split(row)
    cluster = _cluster(row, devices, cores=max(1, split.num_devices // devices))
    dtypes = _dtypes(row.get("precision", ""), cluster.chip)
    if config.family == "gpt_oss":  # 4-bit weights beside 8-bit inputs on chips that have both, else 16-bit inputs
        dtypes = replace(dtypes, weights="fp4", compute="fp8" if cluster.chip.peak("fp4") else "bf16")
    rates = physics() if physics_only else rates_for(engine_name(row))
    tokens_in = positive(row, "input_len")
    if tokens_in is None or tokens_in < 1:
        raise BadInput("no input length")
    tokens_out = max(1, int(positive(row, "output_len") or _DEFAULT_OUT))
    kind, batch = _kind(row, tokens_out, devices)
    load = None
    if kind == "max load":
        load = max_load(row.get("engine", ""), row.get("note", ""), int(tokens_in) + tokens_out, cluster.chip)
    return InferenceRow(
        replica=_replica(row, Replica(config=config, cluster=cluster, split=split, dtypes=dtypes, rates=rates)),
        kind=kind,
        batch=batch,
        tokens_in=int(tokens_in),
        tokens_out=tokens_out,
        load=load,
    )


def engine_name(row: Row) -> str:
    """The engine as engines.toml knows it. Until 0.14 vLLM's scheduler waited for each step, unless a row says async;
    pages that name no release are older."""
    text = (row.get("engine") or "").strip()
    waits = text.lower().startswith("vllm") and "async" not in (row.get("note") or "")
    return "vLLM before 0.14" if waits and (release(text) or (0, 0)) < (0, 14) else text


def _replica(row: Row, replica: Replica) -> Replica:
    """The replica as the row's benchmark runs it."""
    engine = row.get("engine", "").lower()
    if engine.startswith("tensorrt-llm 0"):
        return replace(replica, same_tokens=True)
    if not engine.startswith("tensorrt-llm 1"):
        return replica
    config, split, dtypes = replica.config, replica.split, replica.dtypes
    if config.moe is not None and split.pp == 1:
        split = Split(ep=split.num_devices)
    if config.family == "gpt_oss" and dtypes.compute == "bf16":
        dtypes = replace(dtypes, kv="bf16")
    return replace(replica, split=split, dtypes=dtypes, dispatch="all-gather", keeps_chunks=True)


def positive(row: Row, key: str) -> float | None:
    """The number above 0 in a cell; None where there is none."""
    text = (row.get(key) or "").strip().replace(",", "")
    try:
        value = float(text) if text else 0.0
    except ValueError:
        return None
    return value if 0 < value < _LARGEST else None


# --- devices


def _split(row: Row) -> tuple[Split, int]:
    """(parallelism, devices): tp from its column, stages and expert ranks from the note or from 'EP32'."""
    devices = positive(row, "n_gpus")
    if devices is None or devices < 1:
        raise BadInput("no number of devices")
    count, note, text = int(devices), row.get("note", ""), (row.get("tp") or "").strip()
    if ranks := re.search(r"DEP([1-9]\d{0,4})", note) or re.fullmatch(r"EP([1-9]\d{0,4})", text):
        return Split(ep=int(ranks.group(1))), count
    if "attention-DP" in note and count > 1:
        return Split(ep=count), count
    stages = re.search(r"\bPP([1-9]\d{0,3})", note)
    pp = int(stages.group(1)) if stages else 1
    tp = positive(row, "tp")
    if tp is None:
        raise BadInput(f"tp '{text}' is not a number" if text else "no tp")
    if pp > 1 and int(tp) * pp > count:
        raise BadInput(f"tp={int(tp)} × pp={pp} exceed the {count} devices")
    return Split(tp=max(1, int(tp)), pp=pp), count


def _cluster(row: Row, devices: int, cores: int) -> Cluster:
    """The chips in their default node, or the cores of each as separate devices; a count that does not fill nodes is
    connected by the node's link."""
    chip = chip_of(row.get("gpu", ""))
    if not chip.flops or not chip.memory_bytes_per_s:
        raise BadInput(f"no peak of {chip.title} is published")
    chip = limited_chip(row.get("gpu", ""), chip)
    try:
        if cores == 1:
            known = catalogue.cluster(f"{chip.name}x{devices}") if devices > 1 else catalogue.cluster(chip.name)
            return replace(known, chip=chip)
    except BadInput:
        pass  # not a multiple of nodes
    node = catalogue.nodes()[chip.node]
    tier = Tier(link=catalogue.link(node.link), count=devices * cores)
    return Cluster(name=row.get("gpu", ""), chip=chip_part(chip, cores), tiers=(tier,), node=node)


def _dtypes(text: str, chip: Chip) -> ServingDtypes:
    """'FP8 weights+KV', 'NVFP4', 'int4 g32' … as dtypes that the chip computes in."""
    weights = next((name for part, name in _FORMATS if part in text.lower()), None)
    if weights is None:
        raise BadInput(f"precision '{text}' is not known" if text else "no precision")
    return serving_dtypes(weights, chip)


# --- the measured requests


def _kind(row: Row, tokens_out: int, devices: int) -> tuple[Workload, int]:
    text, note = (row.get("concurrency_or_batch") or "").strip().lower(), row.get("note", "")
    per_device = re.fullmatch(r"(\d+) per gpu", text)
    batch = int(per_device.group(1)) * devices if per_device else positive(row, "concurrency_or_batch")
    if batch and "decode" in row.get("engine", "").lower():
        return "decode only", int(batch)
    if text in ("max load", "max"):
        return "max load", 0
    if batch is None and tokens_out == 1 and "INPUT" in note:
        return "prefill only", 0
    if batch is None or batch < 1:
        raise BadInput(f"batch '{text}' is not a number" if text else "no batch or concurrency")
    if tokens_out == 1:
        return "first token", int(batch)
    if "static batch" in note:
        return "static batch", int(batch)
    return ("batch 1", 1) if batch == 1 else ("closed loop", int(batch))
