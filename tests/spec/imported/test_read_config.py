"""Configurations of other trainers: the same training in our words, and every key is accounted for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.errors import BadRecipe, NotFound
from armillary.spec.imported.from_deepspeed import read_deepspeed
from armillary.spec.imported.from_megatron import read_megatron
from armillary.spec.imported.from_torchtitan import read_torchtitan
from armillary.spec.imported.key_map import Given, Imported
from armillary.spec.imported.read_config import read_configuration, recipe_text
from armillary.spec.imported.script_arguments import arguments
from armillary.spec.recipe import load_recipe

TITAN = """
[job]
description = "Llama 3 70B training"
[model]
name = "llama3"
flavor = "70B"
tokenizer_path = "./tokenizer"
[optimizer]
name = "AdamW"
lr = 1.5e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 8
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[checkpoint]
enable_checkpoint = true
interval = 500
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[metrics]
log_freq = 10
enable_tensorboard = true
"""
DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 5000}},
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}
MEGATRON = """#!/bin/bash
# trains Llama 3 8B --not-an-argument
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-2}
TP=2
ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 4
    --sequence-parallel
    --use-distributed-optimizer
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --swiglu --seq-length 8192 --max-position-embeddings 8192
    --micro-batch-size 1 --global-batch-size 128
    --train-iters 500 --lr 3.0e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES} pretrain_gpt.py "${ARGS[@]}" \\
    --data-path my_text_document --split 99,1,0 --overlap-grad-reduce
"""


def accounted(imported: Imported, keys: set[str]) -> None:
    """Every key of theirs was taken over, left out with a reason, or is a switch whose value says what we always do."""
    listed = {row.theirs for row in imported.mapped} | {row.theirs for row in imported.left_out}
    assert keys - listed <= {"optimizer.name", "optimizer.type", "recompute-method", "recompute-num-layers"} | {
        "checkpoint.enable_checkpoint"
    }
    assert all(row.reason for row in imported.left_out)


def test_torchtitan() -> None:
    imported = read_torchtitan(TITAN, Given(on="h100x64"))
    recipe, layout, train = imported.recipe, imported.recipe.layout, imported.recipe.train
    assert recipe.model.name == "llama-3.1-70b" and recipe.hardware.on == "h100x64"
    assert (layout.dp, layout.shard, layout.zero, layout.tp, layout.micro_batch) == (8, 4, 3, 8, 8)
    assert (layout.recompute, layout.recompute_every, layout.precision) == ("full", 2, "bf16")
    assert (
        train.batch_tokens == 8 * 8 * 8192 and train.lr == 1.5e-4 and train.min_lr == 0 and train.schedule == "linear"
    )
    assert train.save_every == 500 and not train.checkpoint_async and train.track == ("tensorboard",)
    assert {row.theirs for row in imported.left_out} == {
        "job.description",
        "model.tokenizer_path",
        "training.dataset",
    }
    assert read_torchtitan(TITAN, Given()).notes, "how many devices there are is not in the file"


def test_torchtitans_older_keys_pipelines_and_float8() -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[float8]
recipe_name = "rowwise"
[training]
batch_size = 16
global_batch_size = 64
seq_len = 4096
data_parallel_shard_degree = 1
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[lr_scheduler]
decay_ratio = 0.3
lr_min = 0.1
"""
    layout, train = (imported := read_torchtitan(text, Given()).recipe).layout, imported.train
    assert (layout.dp, layout.zero, layout.tp, layout.pp) == (2, 0, 2, 2) and layout.schedule == "interleaved"
    assert (layout.precision, layout.fp8_scaling, layout.micro_batch) == ("fp8", "row", 1)
    assert train.batch_tokens == 64 * 4096 and train.schedule == "wsd" and train.decay_fraction == 0.3
    assert train.lr == 8e-4 and train.min_lr == pytest.approx(8e-5)


def test_deepspeed() -> None:
    imported = read_deepspeed(json.dumps(DEEPSPEED), Given(model="llama-3-8b", sequence=4096))
    layout, train = imported.recipe.layout, imported.recipe.train
    assert (layout.dp, layout.zero, layout.micro_batch, layout.offload) == (8, 2, 4, "optimizer")
    assert layout.bucket_bytes == 1_000_000_000 and layout.precision == "bf16"
    assert train.batch_tokens == 256 * 4096 and train.steps == 5000 and train.schedule == "linear"
    assert train.betas == (0.9, 0.999) and train.weight_decay == 0, "their defaults, not ours"
    reasons = {row.theirs: row.reason for row in imported.left_out}
    assert reasons["optimizer.params.weight_decay"].startswith("auto") and "wall_clock_breakdown" in reasons
    with pytest.raises(BadRecipe, match="256 is not a multiple"):
        read_deepspeed(json.dumps(DEEPSPEED | {"train_micro_batch_size_per_gpu": 3}), Given(model="llama-3-8b"))
    with pytest.raises(BadRecipe, match="names no model"):
        read_deepspeed("{}", Given())


def test_megatron() -> None:
    imported = read_megatron(MEGATRON, Given())
    layout, train = imported.recipe.layout, imported.recipe.train
    assert imported.recipe.model.name == "llama-3-8b", "found by its shape"
    assert (layout.dp, layout.tp, layout.pp, layout.zero, layout.interleave) == (4, 2, 2, 1, 4)
    assert layout.sequence_parallel and layout.schedule == "interleaved" and layout.recompute == "full"
    assert train.batch_tokens == 128 * 8192 and train.warmup_steps == 50 and train.weight_decay == 0.01
    assert {row.theirs for row in imported.left_out} == {"data-path", "split", "overlap-grad-reduce"}


def test_megatron_with_a_shape_of_its_own() -> None:
    text = (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 4096 --swiglu --num-experts 8 --lr 1e-3"
    )
    recipe = read_megatron(
        text + " --seq-length 512 --train-iters 10 --untie-embeddings-and-output-weights", Given()
    ).recipe
    config = recipe.model_config()
    assert (len(config.layers), config.hidden, config.heads, config.kv_heads, config.ffn) == (4, 256, 8, 8, 1024)
    assert config.vocab == 4096 and not config.tied and config.moe is not None and config.moe.num_experts == 8


def test_arguments_of_a_script() -> None:
    found = arguments(MEGATRON)
    assert found["tensor-model-parallel-size"] == 2 and found["nnodes"] == 2 and found["bf16"] is True
    assert "not-an-argument" not in found and arguments("--lr=1e-4 --a-flag") == {"lr": 1e-4, "a-flag": True}


def test_flags_end_with_their_line() -> None:
    script = """ARGS=(
  #  --log-interval 1 \\
    --eval-iters 10 \\
    #--save somewhere \\
    --no-load-optim \\
    --exp-name "issue #5"  # with 'one quote
    --sequence-parallel
)
if [ -n "$KEY" ]; then
    ARGS+=("--fp8-format hybrid" "--fp8-param-gather")
fi
torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]} --save ${1:-checkpoints}
"""
    found = arguments(script)
    assert found.keys().isdisjoint({"log-interval"}) and found["save"] == "checkpoints"
    assert found["sequence-parallel"] is found["fp8-param-gather"] is found["no-load-optim"] is True
    assert (found["eval-iters"], found["fp8-format"], found["nproc-per-node"]) == (10, "hybrid", 8)
    assert arguments("--lr\n1e-4\n--bf16\n") == {"lr": 1e-4, "bf16": True}, "a file of arguments, one per line"


def test_megatron_counted_in_samples() -> None:
    text = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --global-batch-size 8 --lr 1e-3"
    imported = read_megatron(
        f"{text} --train-samples 800 --lr-warmup-samples 80 --lr-decay-samples 700", Given(model="gpt2", on="h100x8")
    )
    assert (imported.recipe.train.steps, imported.recipe.train.warmup_steps) == (100, 10)
    assert {row.theirs: row.reason for row in imported.left_out}["lr-decay-samples"].startswith("the rate decays")


def test_older_deepspeed() -> None:
    """`cpu_offload` and a stage that is only switched on."""
    config = {"train_batch_size": 16, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert read_deepspeed(json.dumps(config), Given(model="gpt2")).recipe.layout.offload == "optimizer"
    config["zero_optimization"] = {"stage": 2, "cpu_offload": False}
    assert read_deepspeed(json.dumps(config), Given(model="gpt2")).recipe.layout.offload == "none"
    assert read_deepspeed('{"zero_optimization": true}', Given(model="gpt2")).recipe.layout.zero == 1


def test_torchtitan_fp8_by_rows_under_quantize() -> None:
    text = """[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[quantize.linear.float8]
recipe_name = "rowwise"
"""
    layout = read_torchtitan(text, Given(on="h100x8")).recipe.layout
    assert (layout.precision, layout.fp8_scaling) == ("fp8", "row")


def test_every_key_is_accounted_for() -> None:
    from armillary.spec.imported.key_map import flat

    accounted(read_deepspeed(json.dumps(DEEPSPEED), Given(model="gpt2")), set(flat(DEEPSPEED)))
    accounted(read_megatron(MEGATRON, Given()), set(arguments(MEGATRON)))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(TITAN)
    imported = read_configuration(path, Given(on="h100x64"))
    (tmp_path / "recipe.toml").write_text(recipe_text(imported, path.name))
    assert load_recipe(tmp_path / "recipe.toml") == imported.recipe, "what is written is what was read"
    with pytest.raises(NotFound, match="no file"):
        read_configuration(tmp_path / "none.json", Given())
    with pytest.raises(BadRecipe, match="--from torchtitan"):
        read_configuration(tmp_path / "job", Given())
    for name, text in (("a.toml", "[["), ("a.json", "{"), ("a.json", "[1]"), ("a.sh", "echo")):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadRecipe, match=r"it (is|has) no"):
            read_configuration(tmp_path / name, Given(model="gpt2"))
