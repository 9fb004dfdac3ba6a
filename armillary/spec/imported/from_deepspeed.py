"""A DeepSpeed configuration (JSON) as a recipe. It holds neither model nor sequence length: the user adds both."""

from __future__ import annotations

import json
from typing import Any

from armillary.errors import BadRecipe
from armillary.spec.imported.key_map import Given, Imported, Keys, flat
from armillary.spec.tables.train import TrainJob

SAME = {
    "zero_optimization.stage": "layout.zero",
    "zero_optimization.mics_shard_size": "layout.shard",
    "tensor_parallel.autotp_size": "layout.tp",
    "sequence_parallel_size": "layout.cp",
    "steps_per_print": "train.log_every",
    "optimizer.params.lr": "train.lr",
    "scheduler.params.warmup_max_lr": "train.lr",
    "scheduler.params.warmup_num_steps": "train.warmup_steps",
    "scheduler.params.total_num_steps": "train.steps",
}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""what follows the warm-up"""
OFFLOADS = {"cpu": "optimizer", "nvme": "nvme"}
AUTO = "auto: the caller of DeepSpeed fills it in; here the planner or the default does"
REASONS = {
    "zero_optimization.offload_param": "weights are not offloaded; see layout.offload",
    "zero_optimization.cpu_offload_params": "weights are not offloaded; see layout.offload",
    "zero_optimization.offload_optimizer": "where offloaded states are, and their buffers, is chosen by armillary",
    "zero_optimization.cpu_offload": "where offloaded states are, and their buffers, is chosen by armillary",
    "zero_optimization.": "buckets, prefetching and overlap are chosen by armillary",
    "optimizer.params.": "it is of their optimizer; AdamW is ours",
    "fp16.": "the loss scale follows by itself",
    "bf16.": "layout.precision says it",
    "activation_checkpointing.": "it does not say that anything is recomputed; set layout.recompute",
    "wall_clock_breakdown": "every step is split into parts anyway",
    "flops_profiler.": "MFU is always recorded; armillary profile says more",
    "monitor_config.": "see train.track",
    "aio.": "reads and writes of checkpoints and offload are asynchronous anyway",
    "zero_allow_untested_optimizer": "AdamW is the optimizer",
    "zero_force_ds_cpu_optimizer": "AdamW is the optimizer",
}


def read_deepspeed(text: str, given: Given) -> Imported:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRecipe(f"it is no JSON ({error}); give a configuration of DeepSpeed") from None
    if not isinstance(values, dict):
        raise BadRecipe("it is no JSON object; give a configuration of DeepSpeed")
    keys = Keys(values=flat(values))
    for name, value in keys.values.items():
        if value == "auto":
            keys.leave_out(name, AUTO)
    keys.values = {name: value for name, value in keys.values.items() if value != "auto"}
    keys.same(SAME)
    if keys.get("zero_optimization") is True:  # as it was written before there were stages
        keys.put("layout.zero", 1, "zero_optimization")
    _precision(keys)
    _optimizer(keys)
    _batch(keys, given)
    _rest(keys)
    return keys.finished(given, REASONS)


def _precision(keys: Keys) -> None:
    switches = [name for name in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled") if name in keys.values]
    on = next((name for name in switches if keys.values[name] is True), None)
    is_auto = any(row.theirs in ("bf16.enabled", "fp16.enabled") for row in keys.left_out)
    precision = "fp16" if on == "fp16.enabled" else "bf16" if on else "auto" if is_auto else "fp32"
    keys.put("layout.precision", precision, *switches)


def _optimizer(keys: Keys) -> None:
    """Their defaults are not ours: no weight decay, β₂ of 0.999, no clipping."""
    kind = str(keys.get("optimizer.type", default=""))
    if kind.lower() in ("adam", "adamw"):
        keys.put(
            "train.betas", list(keys.get("optimizer.params.betas", default=(0.9, 0.999))), "optimizer.params.betas"
        )
        keys.put("train.eps", keys.get("optimizer.params.eps", default=1e-8), "optimizer.params.eps")
        decay = keys.get("optimizer.params.weight_decay", default=0.0)
        keys.put("train.weight_decay", decay, "optimizer.params.weight_decay")
        keys.seen.add("optimizer.type")
    else:
        keys.leave_out("optimizer.type", "AdamW is the optimizer")
    is_auto = any(row.theirs == "gradient_clipping" for row in keys.left_out)
    if not is_auto:
        keys.put("train.clip", keys.get("gradient_clipping", default=0.0), "gradient_clipping")
    schedule = SCHEDULES.get(str(keys.get("scheduler.type")))
    if schedule:
        keys.put("train.schedule", schedule, "scheduler.type")
        if schedule == "linear":
            keys.put("train.min_lr", 0.0)
    rate, ratio = keys.tables.get("train", {}).get("lr"), keys.get("scheduler.params.cos_min_ratio")
    if rate and ratio is not None:
        keys.put("train.min_lr", rate * ratio, "scheduler.params.cos_min_ratio")


def _batch(keys: Keys, given: Given) -> None:
    """train_batch_size = micro-batch × accumulation × dp: two of the three and the devices give the rest."""
    global_batch, micro, steps = (
        keys.number(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    layout = keys.tables.setdefault("layout", {})
    dp = keys.data_parallel(given.num_devices, layout.get("tp", 1) * layout.get("cp", 1))
    if dp is None and global_batch and micro:
        dp = _quotient(
            global_batch, micro * (steps or 1), "train_batch_size", "micro-batch × gradient_accumulation_steps"
        )
    if dp is None:
        dp = 1
        keys.notes.append("the number of devices is not in the file: name them with --on, or set layout.dp")
    if micro is None:
        micro = (
            _quotient(global_batch, dp * (steps or 1), "train_batch_size", "dp × gradient_accumulation_steps")
            if global_batch
            else 1
        )
    rows = global_batch or micro * (steps or 1) * dp
    keys.put("layout.dp", dp, "train_batch_size", "gradient_accumulation_steps")
    keys.put("layout.micro_batch", micro, "train_micro_batch_size_per_gpu")
    if given.sequence is None:
        keys.notes.append(f"DeepSpeed knows no sequence length: {TrainJob.sequence} is assumed; give --sequence")
    sequence = given.sequence or TrainJob.sequence
    keys.put("train.sequence", sequence)
    keys.put("train.batch_tokens", rows * sequence)


def _quotient(global_batch: int, part: int, name: str, of: str) -> int:
    if global_batch % part:
        raise BadRecipe(f"{name} = {global_batch} is not a multiple of {of} = {part}; correct one of them")
    return global_batch // part


def _rest(keys: Keys) -> None:
    places = ("zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload")
    device = str(keys.get(places[0], default="cpu" if keys.get(places[1]) is True else "none"))
    if device in OFFLOADS:
        keys.put("layout.offload", OFFLOADS[device], *places)
    bucket: Any = keys.get("zero_optimization.reduce_bucket_size")
    if bucket is not None:  # theirs counts elements of two bytes
        keys.put("layout.bucket_bytes", int(float(bucket) * 2), "zero_optimization.reduce_bucket_size")
    switches = {"tensorboard.enabled": "tensorboard", "wandb.enabled": "wandb"}
    track = [ours for theirs, ours in switches.items() if keys.get(theirs) is True]
    if track:
        keys.put("train.track", track, *switches)
