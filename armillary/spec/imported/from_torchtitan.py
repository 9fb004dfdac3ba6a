"""A torchtitan job file (TOML, v0.1.0 to v0.2) as a recipe."""

from __future__ import annotations

import tomllib

from armillary.errors import BadRecipe
from armillary.spec.imported.key_map import Given, Imported, Keys, flat

MODELS = {
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama4", "17bx16e"): "llama-4-scout",
    ("llama4", "17bx128e"): "llama-4-maverick",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
}
SAME = {
    "training.seq_len": "train.sequence",
    "training.steps": "train.steps",
    "training.max_norm": "train.clip",
    "training.compile": "train.compile",
    "compile.enable": "train.compile",
    "training.seed": "train.seed",
    "debug.seed": "train.seed",
    "training.deterministic": "train.deterministic",
    "debug.deterministic": "train.deterministic",
    "training.dataset_path": "data.source",
    "optimizer.lr": "train.lr",
    "optimizer.eps": "train.eps",
    "optimizer.weight_decay": "train.weight_decay",
    "lr_scheduler.warmup_steps": "train.warmup_steps",
    "training.warmup_steps": "train.warmup_steps",
    "checkpoint.interval": "train.save_every",
    "checkpoint.keep_latest_k": "train.keep",
    "metrics.log_freq": "train.log_every",
    "parallelism.tensor_parallel_degree": "layout.tp",
    "training.tensor_parallel_degree": "layout.tp",
    "parallelism.pipeline_parallel_degree": "layout.pp",
    "experimental.pipeline_parallel_degree": "layout.pp",
    "training.pipeline_parallel_degree": "layout.pp",
    "parallelism.context_parallel_degree": "layout.cp",
    "experimental.context_parallel_degree": "layout.cp",
    "parallelism.expert_parallel_degree": "layout.ep",
    "validation.steps": "train.eval_batches",
}
"""keys that mean the same there and here"""
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zero_bubble",
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
THEIR_LR = 8e-4
REASONS = {
    "job.": "a run's folder and name are ours",
    "comm.": "timeouts of collectives are by axis: train.timeouts",
    "profiling.": "train.profile_every profiles without a trace file; armillary profile writes one",
    "memory_estimation.": "armillary plan predicts memory",
    "model.": "the shape is the catalogue's, or a folder's: [model]",
    "fault_tolerance.": "see train.max_restarts and peer_copy_every",
    "training.dataset": "name files with data.source",
    "parallelism.disable_loss_parallel": "the loss is always parallel where the head is sharded",
    "float8.": "fp8 follows layout.precision and fp8_scaling",
    "quantize.": "fp8 follows layout.precision and fp8_scaling",
    "metrics.": "everything is in gauges.jsonl; see train.track",
    "checkpoint.folder": "a run's folder and name are ours",
    "checkpoint.": "checkpoints hold all that resuming needs; armillary convert exports the weights",
    "compile.": "what is compiled is chosen by armillary; see train.compile",
    "parallelism.enable_async_tensor_parallel": "communication overlaps computation where the plan says so",
    "experimental.enable_async_tensor_parallel": "communication overlaps computation where the plan says so",
    "validation.": "see data.held_out",
}


def read_torchtitan(text: str, given: Given) -> Imported:
    try:
        keys = Keys(values=flat(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise BadRecipe(f"it is no TOML ({error}); give a job file of torchtitan") from None
    keys.same(SAME)
    if "optimizer.lr" not in keys.values:
        keys.put("train.lr", THEIR_LR)
        keys.notes.append(f"optimizer.lr is not set: train.lr is their default, {THEIR_LR:g}")
    _model(keys)
    _layout(keys, given)
    _optimizer(keys)
    _precision(keys)
    _recompute(keys)
    _telemetry(keys)
    return keys.finished(given, REASONS)


def _model(keys: Keys) -> None:
    flavor = (str(keys.get("model.name", default="")), str(keys.get("model.flavor", default="")))
    if flavor in MODELS:
        keys.put("model.name", MODELS[flavor], "model.name", "model.flavor")
    for name in ("model.tokenizer_path", "model.hf_assets_path"):
        keys.leave_out(name, "name a folder with a tokenizer.json: data.tokenizer")


def _layout(keys: Keys, given: Given) -> None:
    shard_keys = (
        "parallelism.data_parallel_shard_degree",
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",
    )
    copies_keys = ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree")
    shard, copies = keys.number(*shard_keys, default=-1), keys.number(*copies_keys, default=1)
    layout = keys.tables.setdefault("layout", {})
    inner = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    if shard < 0:
        rest = keys.data_parallel(given.num_devices, inner * copies)
        shard = 1 if rest is None else rest
        if rest is None:
            keys.notes.append("data_parallel_shard_degree is the rest of the devices: name them with --on")
    keys.put("layout.dp", shard * copies, *shard_keys, *copies_keys)
    resharding = keys.get("parallelism.fsdp_reshard_after_forward", default="default")
    unsharded = keys.get(*shard_keys, default=-1) == 1
    keys.put(
        "layout.zero", 0 if unsharded else 2 if resharding == "never" else 3, "parallelism.fsdp_reshard_after_forward"
    )
    if copies > 1 and shard > 1:
        keys.put("layout.shard", shard)
    _pipeline(keys)
    _batch(keys, shard * copies)


def _pipeline(keys: Keys) -> None:
    name = "parallelism.pipeline_parallel_schedule"
    schedule = str(keys.get(name, "experimental.pipeline_parallel_schedule", default="")).lower()
    if schedule in SCHEDULES and keys.tables["layout"].get("pp", 1) > 1:
        keys.put("layout.schedule", SCHEDULES[schedule], name, "experimental.pipeline_parallel_schedule")
        if SCHEDULES[schedule] == "interleaved":
            keys.put("layout.interleave", 2)
    elif schedule and keys.tables["layout"].get("pp", 1) == 1:
        keys.leave_out(name, "there is one stage")


def _batch(keys: Keys, dp: int) -> None:
    """Their local batch is one micro-batch, unless a pipeline splits it; the global batch is what a step has."""
    names = ("training.local_batch_size", "training.batch_size")
    local, global_batch = keys.number(*names, default=8), keys.number("training.global_batch_size", default=-1)
    sequence = keys.number("training.seq_len", default=2048)
    micro = local
    if keys.tables["layout"].get("pp", 1) > 1:
        micro = keys.number("parallelism.pipeline_parallel_microbatch_size", default=1)
    keys.put("layout.micro_batch", micro, *names, "parallelism.pipeline_parallel_microbatch_size")
    keys.put("train.sequence", sequence)
    keys.put(
        "train.batch_tokens",
        (global_batch if global_batch > 0 else local * dp) * sequence,
        "training.global_batch_size",
    )


def _optimizer(keys: Keys) -> None:
    name = str(keys.get("optimizer.name", default="AdamW"))
    if name.lower() in ("adam", "adamw"):
        keys.seen.add("optimizer.name")
    else:
        keys.leave_out("optimizer.name", "AdamW is the optimizer")
    betas = [keys.get("optimizer.beta1", default=0.9), keys.get("optimizer.beta2", default=0.95)]
    keys.put("train.betas", betas, "optimizer.beta1", "optimizer.beta2")
    rate, factor = (
        keys.tables["train"]["lr"],
        keys.get("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min", default=0.0),
    )
    keys.put("train.min_lr", rate * factor, "lr_scheduler.min_lr_factor", "lr_scheduler.lr_min")
    _decay(keys)


def _decay(keys: Keys) -> None:
    ratio, shape = keys.get("lr_scheduler.decay_ratio"), str(keys.get("lr_scheduler.decay_type", default="linear"))
    if ratio is not None:
        keys.put("train.schedule", "wsd", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type")
        keys.put("train.decay_fraction", ratio)
    elif shape in ("linear", "cosine"):
        keys.put("train.schedule", shape, "lr_scheduler.decay_type")
    else:
        keys.put("train.schedule", "linear")
        keys.leave_out("lr_scheduler.decay_type", "decays are linear, cosine or wsd")


def _precision(keys: Keys) -> None:
    converters = keys.get("model.converters", default=[])
    if "float8" in converters or "quantize.linear.float8" in converters:
        keys.put("layout.precision", "fp8", "model.converters")
        names = ("float8.recipe_name", "quantize.linear.float8.recipe_name")
        scaling = {"rowwise": "row", "rowwise_with_gw_hp": "row"}.get(str(keys.get(*names)), "tensor")
        keys.put("layout.fp8_scaling", scaling, *names)
        return
    dtype = str(keys.get("training.mixed_precision_param", default="bfloat16"))
    keys.put("layout.precision", DTYPES.get(dtype, "bf16"), "training.mixed_precision_param")


def _recompute(keys: Keys) -> None:
    mode, option = (
        str(keys.get("activation_checkpoint.mode", default="selective")),
        str(keys.get("activation_checkpoint.selective_ac_option", default="op")),
    )
    if mode == "selective" and option.isdigit():
        keys.put("layout.recompute", "full", "activation_checkpoint.mode")
        keys.put("layout.recompute_every", int(option), "activation_checkpoint.selective_ac_option")
    elif mode in ("none", "selective", "full"):
        keys.put("layout.recompute", mode, "activation_checkpoint.mode")
        keys.leave_out("activation_checkpoint.selective_ac_option", "selective keeps what GEMMs and attention return")


def _telemetry(keys: Keys) -> None:
    switches = {"metrics.enable_tensorboard": "tensorboard", "metrics.enable_wandb": "wandb"}
    track = [ours for theirs, ours in switches.items() if keys.get(theirs)]
    keys.put("train.track", track, *switches)
    saves = keys.get("checkpoint.enable", "checkpoint.enable_checkpoint", default=False)
    if not saves:
        keys.put("train.save_every", 0, "checkpoint.enable", "checkpoint.enable_checkpoint")
    else:
        keys.seen |= {"checkpoint.enable", "checkpoint.enable_checkpoint"}
    if "checkpoint.async_mode" in keys.values:
        keys.put("train.checkpoint_async", keys.get("checkpoint.async_mode") != "disabled", "checkpoint.async_mode")
    validates = keys.get("validation.enable", "validation.enabled", default=False)
    interval = keys.number("validation.freq", default=10) if validates else 0
    keys.put("train.eval_every", interval, "validation.freq", "validation.enable", "validation.enabled")
