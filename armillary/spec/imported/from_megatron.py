"""Arguments of Megatron-LM's pretrain_*.py as a recipe: a shell script, or the arguments alone."""

from __future__ import annotations

from typing import Any

from armillary.errors import BadRecipe
from armillary.spec import catalogue
from armillary.spec.imported.key_map import Given, Imported, Keys
from armillary.spec.imported.script_arguments import arguments

SAME = {
    "tensor-model-parallel-size": "layout.tp",
    "pipeline-model-parallel-size": "layout.pp",
    "context-parallel-size": "layout.cp",
    "expert-model-parallel-size": "layout.ep",
    "micro-batch-size": "layout.micro_batch",
    "seq-length": "train.sequence",
    "train-iters": "train.steps",
    "lr": "train.lr",
    "lr-warmup-iters": "train.warmup_steps",
    "save-interval": "train.save_every",
    "log-interval": "train.log_every",
    "eval-interval": "train.eval_every",
    "eval-iters": "train.eval_batches",
    "moe-aux-loss-coeff": "train.balance_loss",
    "moe-z-loss-coeff": "train.router_z_loss",
    "moe-expert-capacity-factor": "train.expert_capacity",
    "deterministic-mode": "train.deterministic",
}
DEFAULTS = {
    "weight-decay": ("train.weight_decay", 0.01),
    "clip-grad": ("train.clip", 1.0),
    "adam-eps": ("train.eps", 1e-8),
    "seed": ("train.seed", 1234),
    "min-lr": ("train.min_lr", 0.0),
}
"""their key -> (ours, their default, which is not always ours)"""
SHAPE = {
    "num-layers": "num_layers",
    "hidden-size": "hidden",
    "ffn-hidden-size": "ffn",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
    "kv-channels": "head_dim",
    "vocab-size": "vocab",
    "max-position-embeddings": "context",
    "norm-epsilon": "norm_eps",
}
UNTIL_THE_END = "the rate decays until the last step"
REASONS = {
    **dict.fromkeys(
        (
            "use-mcore-models",
            "position-embedding-type",
            "rotary-",
            "normalization",
            "norm-epsilon",
            "apply-layernorm-1p",
            "disable-bias-linear",
            "add-qkv-bias",
            "qk-layernorm",
            "untie-embeddings-and-output-weights",
            "no-position-embedding",
            "make-vocab-size-divisible-by",
        ),
        "the shape is the catalogue's, or a folder's: [model]",
    ),
    "mock-data": "name files with data.source",
    "num-workers": "see data.workers",
    "rampup-batch-size": "the batch has one size",
    "decoupled-": "all weights have one learning rate",
    "distributed-timeout": "timeouts of collectives are by axis: train.timeouts",
    "profile": "train.profile_every profiles without a trace file; armillary profile writes one",
    "ckpt-format": "a run's folder is ours",
    "tokenizer-": "name a folder with a tokenizer.json: data.tokenizer",
    "vocab-file": "name a folder with a tokenizer.json: data.tokenizer",
    "merge-file": "name a folder with a tokenizer.json: data.tokenizer",
    "data-path": "their .bin and .idx files are not ours: prepare the text with armillary data prepare",
    "data-cache-path": "see data.cache",
    "split": "see data.held_out",
    "save": "a run's folder is ours",
    "load": "armillary train --resume finds the newest checkpoint",
    "use-flash-attn": "the fastest kernel that agrees is chosen",
    "attention-backend": "the fastest kernel that agrees is chosen",
    "transformer-impl": "the fastest kernel that agrees is chosen",
    "overlap-": "communication overlaps computation where the plan says so",
    "tp-comm-overlap": "communication overlaps computation where the plan says so",
    "attention-dropout": "pretraining has no dropout here",
    "hidden-dropout": "pretraining has no dropout here",
    "init-method-std": "initial weights follow the model's family",
    "distributed-backend": "NCCL on GPUs, gloo on CPUs",
    "master-": "armillary launch and torchrun set it",
    "node-rank": "armillary launch and torchrun set it",
    "no-load": "see armillary train --resume",
    "log-": "everything is in gauges.jsonl",
    "fp8-": "fp8 follows layout.precision and fp8_scaling",
    "moe-token-dispatcher-type": "chosen by layout.ep",
    "moe-grouped-gemm": "the fastest kernel that agrees is chosen",
}


def read_megatron(text: str, given: Given) -> Imported:
    keys = Keys(values=arguments(text))
    if not keys.values:
        raise BadRecipe("it has no --arguments; give a script or a file with arguments of Megatron-LM")
    keys.same(SAME)
    for theirs, (ours, default) in DEFAULTS.items():
        keys.put(ours, keys.get(theirs, default=default), theirs)
    betas = [keys.get("adam-beta1", default=0.9), keys.get("adam-beta2", default=0.999)]
    keys.put("train.betas", betas, "adam-beta1", "adam-beta2")
    _model(keys, given)
    _layout(keys, given)
    _schedule(keys)
    _precision(keys)
    _recompute(keys)
    _track(keys)
    return keys.finished(given, REASONS)


def _model(keys: Keys, given: Given) -> None:
    """A model of the catalogue with this shape, or the overrides that make one of it."""
    shape = {
        ours: keys.number(theirs) for theirs, ours in SHAPE.items() if ours != "norm_eps" and theirs in keys.values
    }
    if given.model or "num_layers" not in shape or "hidden" not in shape:
        return
    theirs = [name for name in SHAPE if name in keys.values]
    is_gated = "swiglu" in keys.values
    same = [name for name, entry in catalogue.models().items() if _has_shape(entry.config, shape, is_gated)]
    if same:
        keys.put("model.name", same[0], *theirs, "swiglu", "group-query-attention")
        if len(same) > 1:
            keys.notes.append(f"the same shape have {', '.join(same[1:])}; --model takes another")
        return
    keys.put("model.name", "llama-3-8b" if is_gated else "gpt2", "swiglu", "group-query-attention")
    _overrides(keys, shape)
    keys.notes.append("no model of the catalogue has this shape: [model] states it; compare what is left out")


def _overrides(keys: Keys, shape: dict[str, Any]) -> None:
    heads = shape.get("heads", 1)
    shape.setdefault("kv_heads", heads)
    shape.setdefault("head_dim", shape["hidden"] // heads)
    shape.setdefault("ffn", 4 * shape["hidden"])
    for ours, value in shape.items():
        keys.put(f"model.{ours}", value, *(theirs for theirs, name in SHAPE.items() if name == ours))
    if "norm-epsilon" in keys.values:
        keys.put("model.norm_eps", keys.get("norm-epsilon"), "norm-epsilon")
    keys.put(
        "model.tied", "untie-embeddings-and-output-weights" not in keys.values, "untie-embeddings-and-output-weights"
    )
    if "rotary-base" in keys.values:
        keys.put("model.rope", {"theta": float(keys.get("rotary-base"))}, "rotary-base")
    if "num-experts" in keys.values:
        experts = {
            "num_experts": keys.number("num-experts"),
            "top_k": keys.number("moe-router-topk", default=2),
            "ffn": keys.number("moe-ffn-hidden-size", default=shape["ffn"]),
        }
        keys.put("model.moe", experts, "num-experts", "moe-router-topk", "moe-ffn-hidden-size")


def _has_shape(config: Any, shape: dict[str, Any], is_gated: bool) -> bool:
    if config.gated != is_gated or len(config.layers) != shape["num_layers"]:
        return False
    # the context is how long it was trained, the vocabulary is padded: neither makes another model
    return all(
        getattr(config, key) == value for key, value in shape.items() if key not in ("num_layers", "context", "vocab")
    )


def _layout(keys: Keys, given: Given) -> None:
    layout = keys.tables.setdefault("layout", {})
    per_node, nodes = keys.number("nproc-per-node"), keys.number("nnodes", default=1)
    world = given.num_devices or (per_node * nodes if per_node else None)
    dp = keys.data_parallel(world, layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1))
    if dp is None:
        keys.notes.append("the number of devices is not in the file: name them with --on, or set layout.dp")
    keys.put("layout.dp", dp or 1, "nproc-per-node", "nnodes")
    sharding = str(keys.get("data-parallel-sharding-strategy", default=""))
    fully = any(name in keys.values for name in ("use-torch-fsdp2", "use-custom-fsdp", "use-megatron-fsdp"))
    zero = (
        3
        if fully and sharding in ("", "optim_grads_params")
        else 1
        if "use-distributed-optimizer" in keys.values
        else 0
    )
    switches = ("use-distributed-optimizer", "use-torch-fsdp2", "use-custom-fsdp", "use-megatron-fsdp")
    keys.put("layout.zero", zero, *switches, "data-parallel-sharding-strategy")
    if layout.get("tp", 1) > 1:
        keys.put("layout.sequence_parallel", "sequence-parallel" in keys.values, "sequence-parallel")
    else:
        keys.leave_out("sequence-parallel", "there is one tensor-parallel rank")
    _interleaving(keys)
    _batch(keys, given, dp or 1)


def _interleaving(keys: Keys) -> None:
    stages = keys.tables["layout"].get("pp", 1)
    per_stage = "num-layers-per-virtual-pipeline-stage"
    chunks = keys.number("num-virtual-stages-per-pipeline-rank")
    if per_stage in keys.values and "num-layers" in keys.values:
        chunks = keys.number("num-layers") // stages // keys.number(per_stage)
    if chunks and chunks > 1 and stages > 1:
        keys.put("layout.interleave", chunks, per_stage, "num-virtual-stages-per-pipeline-rank")
        keys.put("layout.schedule", "interleaved")


def _batch(keys: Keys, given: Given, dp: int) -> None:
    sequence = given.sequence or keys.number("seq-length", default=1024)
    rows = keys.number("global-batch-size", default=keys.number("micro-batch-size", default=1) * dp)
    keys.put("train.sequence", sequence)
    keys.put("train.batch_tokens", rows * sequence, "global-batch-size")
    if "train-samples" in keys.values:
        keys.put("train.steps", max(1, keys.number("train-samples") // rows), "train-samples")


def _schedule(keys: Keys) -> None:
    style = str(keys.get("lr-decay-style", default="linear")).lower()
    ours = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "wsd"}.get(style)
    if ours:
        keys.put("train.schedule", ours, "lr-decay-style")
    steps = keys.tables["train"].get("steps")
    if "lr-warmup-fraction" in keys.values and steps:
        share = float(keys.get("lr-warmup-fraction"))
        keys.put("train.warmup_steps", round(share * steps), "lr-warmup-fraction")
    if "lr-warmup-samples" in keys.values:
        rows = keys.tables["train"]["batch_tokens"] // keys.tables["train"]["sequence"]
        keys.put("train.warmup_steps", keys.number("lr-warmup-samples") // rows, "lr-warmup-samples")
    if "lr-decay-iters" in keys.values and keys.get("lr-decay-iters") == steps:
        keys.seen.add("lr-decay-iters")
    else:
        keys.leave_out("lr-decay-iters", UNTIL_THE_END)
    keys.leave_out("lr-decay-samples", UNTIL_THE_END)


def _precision(keys: Keys) -> None:
    fp8 = [name for name in ("fp8-format", "fp8-hybrid") if name in keys.values]
    switch = next((name for name in ("bf16", "fp16") if name in keys.values), "")
    keys.put("layout.precision", "fp8" if fp8 else switch or "fp32", *fp8, "bf16", "fp16")


def _recompute(keys: Keys) -> None:
    kind = str(
        keys.get("recompute-granularity", default="selective" if "recompute-activations" in keys.values else "none")
    )
    if kind in ("none", "selective", "full"):
        keys.put("layout.recompute", kind, "recompute-granularity", "recompute-activations")
    if kind == "full" and keys.get("recompute-method") == "uniform":
        keys.seen |= {"recompute-method", "recompute-num-layers"}  # how many layers are one unit changes no result
    for name in ("recompute-method", "recompute-num-layers"):
        if name not in keys.seen:
            keys.leave_out(name, "see layout.recompute_every")


def _track(keys: Keys) -> None:
    places = {"tensorboard-dir": "tensorboard", "wandb-project": "wandb"}
    track = [ours for theirs, ours in places.items() if theirs in keys.values]
    if track:
        keys.put("train.track", track, *places)
