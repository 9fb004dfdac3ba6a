"""LoRA: adapters start as nothing, learn alone, merge exactly, and are those that peft reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from armillary.errors import ArmillaryError
from armillary.model.layers.attention_forms import OverLatents, plain
from armillary.model.lora import NAMES, LoraLinear, adapters, change, expand_b
from armillary.model.transformer import Transformer, build
from armillary.model.weights import safetensors_writer
from armillary.model.weights.hf_layout import FAMILIES as NAMED
from armillary.model.weights.hf_layout import rules
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.spec import catalogue
from armillary.spec.lora import STACKED, adapter_weights, targets
from armillary.spec.recipe import Recipe
from armillary.spec.tables.model import model_table
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.training.checkpoint.export import MergedWeights
from armillary.training.prepare_run import model_source, resolve_run, train_recipe
from armillary.training.step.lora import add_lora, base_dtype, peft_tensors, save_adapter
from armillary.training.step.optimizer import make_optimizer
from armillary.training.telemetry.step_telemetry import StepReport
from tests.model.families import FAMILIES, GATED, random_model

TINY = catalogue.model("armillary-2m").config
ALL = ("qkv", "out", "gate_up", "down")


def adapted(tmp_path: Path, family: str = "llama", seed: int = 0, **job: object) -> tuple[Transformer, TrainJob]:
    """A random model of a family with adapters whose B is not zero."""
    random_model(family, seed).save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", dtype=torch.float32)
    settings = TrainJob(**({"lora_rank": 3, "lora_alpha": 5.0} | job))  # type: ignore[arg-type]
    add_lora(model, settings)
    generator = torch.Generator().manual_seed(seed)
    for _, module in adapters(model):
        module.lora_b.data.normal_(0, 0.1, generator=generator)
    return model.eval(), settings


def logits(model: Transformer, seed: int = 0) -> torch.Tensor:
    tokens = torch.randint(0, model.config.vocab, (2, 11), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model.head(model(tokens, torch.arange(11).expand(2, 11), plain))


def near(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return float((left - right).norm() / right.norm()) < tolerance


def save_merged(model: Transformer, job: TrainJob, folder: Path) -> Path:
    """The folder that a run exports, adapters merged in, of a model on one device."""
    tensors = model.state_dict()
    sharded: Any = SimpleNamespace(model=model, full_tensor=tensors.__getitem__)
    return save_model(model, folder, read=MergedWeights(sharded.model.config, sharded.full_tensor, job))


def test_a_new_adapter_changes_nothing(tmp_path: Path) -> None:
    random_model("llama", 1).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    before = logits(model)
    add_lora(model, TrainJob(lora_rank=4))
    assert torch.equal(logits(model), before)


def test_rank_0_leaves_the_model_alone(tmp_path: Path) -> None:
    random_model("llama", 1).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    add_lora(model, TrainJob(), precision="bf16")
    assert not any(adapters(model)) and next(model.parameters()).dtype is torch.float32


PARTS = [("q", "v"), ("k", "out"), ("qkv", "up"), ("gate", "q")]
LATENT = ("deepseek_v2", "deepseek_v3")  # other parts
KNOWN = [family for family in FAMILIES if family in NAMED and family not in (*LATENT, *GATED)]
MERGED = [
    *((family, ALL) for family in (*KNOWN, *LATENT)),
    ("deepseek_v3", ("q_a", "kv_b", "down")),
    ("deepseek_v3", ("q_b", "kv_a")),
    *((family, on) for family in ("llama", "phi3", "qwen3_moe") for on in PARTS),  # plain, stacked, with experts
]
OTHERS = [(family, on) for family in KNOWN for on in PARTS if (family, on) not in MERGED]


@pytest.mark.parametrize(("family", "on"), [*MERGED, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)])
def test_merged_computes_the_same_in_every_family(tmp_path: Path, family: str, on: tuple[str, ...]) -> None:
    model, job = adapted(tmp_path, family, seed=len(on), lora_on=on)
    with_adapters = logits(model)
    assert not near(with_adapters, logits(load_model(tmp_path / "base", dtype=torch.float32)), 1e-3)
    whole = load_model(save_merged(model, job, tmp_path / "merged"))
    assert not any(adapters(whole)) and near(logits(whole), with_adapters)


def test_absorbed_latents_have_the_adapters_too(tmp_path: Path) -> None:
    """Queries are multiplied by the up-projection itself where latents are cached."""
    model, _ = adapted(tmp_path, "deepseek_v3", seed=1, lora_on=("kv_b",))
    tokens = torch.randint(0, model.config.vocab, (2, 11), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(11).expand(2, 11)
    with torch.no_grad():
        absorbed = model.head(model(tokens, positions, OverLatents(plain)))
    assert near(absorbed, logits(model))


def test_only_adapters_learn_and_their_number_is_known(tmp_path: Path) -> None:
    model, job = adapted(tmp_path, "qwen3", lora_on=("q", "v", "down"))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(name.endswith(NAMES) for name in trained)
    assert sum(p.numel() for p in trained.values()) == adapter_weights(model.config, rank=3, on=job.lora_on)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, job)
    tokens = torch.arange(10).view(1, 10)
    model.head(model(tokens, tokens, plain)).logsumexp(-1).sum().backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(trained)


def test_gradients_are_those_of_the_whole_matrix(tmp_path: Path) -> None:
    """dA = scale·Bᵀ·dW and dB = scale·dW·Aᵀ, block by block: the chain rule through the merged matrix, in fp64."""
    model, job = adapted(tmp_path, "llama", seed=3, lora_on=("q", "v"))
    model = model.double()
    tokens = torch.arange(12).view(2, 6)
    module = next(module for _, module in adapters(model))
    model.head(model(tokens, tokens, plain)).square().sum().backward()
    mine = module.lora_a.grad.clone(), module.lora_b.grad.clone()
    a, b = module.lora_a.detach().requires_grad_(), module.lora_b.detach().requires_grad_()
    weight = module.weight + change(a, b, module.target, scale=job.lora_scale)
    plain_linear = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    del plain_linear.weight
    plain_linear.weight, plain_linear.bias = weight, module.bias  # type: ignore[assignment]
    model.blocks["0"].attention.qkv = plain_linear
    model.head(model(tokens, tokens, plain)).square().sum().backward()
    for ours, theirs in zip(mine, (a.grad, b.grad), strict=True):
        assert near(ours, theirs, 1e-10)


@pytest.mark.parametrize("pieces", [2, 4])
def test_a_cut_of_the_outputs_is_a_cut_of_the_adapters(pieces: int) -> None:
    """As tensor parallelism cuts them: rows of B in equal runs are rows of the fused matrix in equal runs."""
    config = replace(TINY, hidden=32, ffn=24, heads=8, kv_heads=4, head_dim=4)
    for name, target in targets(config, ("q", "v", "up", "out")).items():
        rows = target.periods * target.adapted
        b = torch.randn(rows, 2)
        whole = expand_b(b, target)
        parts = [expand_b(piece, target) for piece in b.chunk(pieces)]
        assert torch.equal(torch.cat(parts), whole), name


def test_dropout_only_while_training(tmp_path: Path) -> None:
    model, _ = adapted(tmp_path, lora_dropout=0.5)
    quiet = logits(model)
    assert torch.equal(logits(model), quiet)
    model.train()
    assert not torch.equal(logits(model), quiet)


def test_the_base_is_kept_in_the_format_it_is_multiplied_in() -> None:
    job = TrainJob(lora_rank=2)
    assert base_dtype(job, "bf16") is torch.bfloat16 and base_dtype(job, "tf32") is torch.float32
    assert base_dtype(TrainJob(), "bf16") is torch.float32
    model = build(TINY, dtype=torch.float32, device="cpu", seed=0)
    add_lora(model, job, precision="bf16")
    kinds = {name.endswith(NAMES): parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds == {False: torch.bfloat16, True: torch.float32}
    tokens = torch.arange(6).view(1, 6)
    model(tokens, tokens, plain).float().sum().backward()  # without autocast, too
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters() if p.requires_grad)


def test_adapters_start_alike_whatever_the_order() -> None:
    first, second = (build(TINY, dtype=torch.float32, device="cpu") for _ in range(2))
    add_lora(first, TrainJob(lora_rank=2))
    add_lora(second, TrainJob(lora_rank=2, lora_on=("down", "qkv")))
    drawn = dict(first.named_parameters())
    shared = [name for name, _ in second.named_parameters() if name.endswith(NAMES)]
    assert shared and all(torch.equal(drawn[name], dict(second.named_parameters())[name]) for name in shared)
    a = drawn["blocks.0.attention.qkv.lora_a"]
    assert 0.9 < float(a.detach().abs().max()) * a.shape[1] ** 0.5 <= 1.0


def test_a_full_disk_while_adapters_are_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    model, job = adapted(tmp_path)
    monkeypatch.setattr(safetensors_writer, "save_file", full)
    with pytest.raises(ArmillaryError, match=r"disk full while writing .*/adapter; free some space"):
        save_adapter(model.state_dict(), model.config, job, tmp_path / "adapter", base="base")
    assert not (tmp_path / "adapter").exists()


def test_families_that_stack_are_known() -> None:
    assert {family for family, names in NAMED.items() if len(names.qkv) == 1} == set(STACKED)


# --- what others read


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "mixtral", "gemma2"])
def test_an_adapter_folder_adds_up_to_the_merged_weights(tmp_path: Path, family: str) -> None:
    """W + alpha/r · B·A with the names and numbers of the files alone gives the merged folder."""
    model, job = adapted(tmp_path, family, seed=2, lora_on=("qkv", "up", "out"))
    folder = save_adapter(model.state_dict(), model.config, job, tmp_path / "adapter", base=str(tmp_path / "base"))
    save_merged(model, job, tmp_path / "merged")
    settings = json.loads((folder / "adapter_config.json").read_text())
    found, base = load_file(folder / "adapter_model.safetensors"), load_file(tmp_path / "base/model.safetensors")
    whole = load_file(tmp_path / "merged/model.safetensors")
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in found}
    assert len(names) == len(found) / 2 > 0
    for name in names:
        a, b = (found[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        expected = base[f"{name}.weight"] + settings["lora_alpha"] / settings["r"] * b @ a
        assert near(whole[f"{name}.weight"], expected)
        assert any(name == each or name.endswith(f".{each}") for each in settings["target_modules"])


@pytest.mark.peers
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2", "olmo2"])
@pytest.mark.parametrize("on", [ALL, ("q", "v"), ("gate", "k")])
def test_peft_loads_the_folder_and_computes_the_same(tmp_path: Path, family: str, on: tuple[str, ...]) -> None:
    import peft
    import transformers

    model, job = adapted(tmp_path, family, seed=4, lora_on=on)
    folder = save_adapter(model.state_dict(), model.config, job, tmp_path / "adapter", base=str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    tokens = torch.randint(0, model.config.vocab, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert near(logits(model), theirs(tokens).logits)
    loaded = {name: tensor for name, tensor in peft.get_peft_model_state_dict(theirs).items()}
    ours = peft_tensors(model.state_dict(), model.config, job)
    assert set(loaded) == set(ours) and all(torch.equal(loaded[name], ours[name]) for name in ours)


def test_every_rule_that_an_adapter_needs_is_there(tmp_path: Path) -> None:
    model, _ = adapted(tmp_path)
    known = {rule.name for rule in rules(model.config)}
    assert all(f"{name}.weight" in known and isinstance(module, LoraLinear) for name, module in adapters(model))


# --- a whole run


def test_a_run_trains_merges_and_writes_its_adapters(home: Home, recipe: Callable[..., Recipe]) -> None:
    """Only adapters change; the export is the base with them merged in, and the adapter folder says the same."""
    settings = ["train.steps=4", "train.lora_rank=2", "train.lr=0.01", "train.profile_every=0"]
    first = train_recipe(recipe("train.steps=1", "train.profile_every=0"), home=home, device="cpu")
    assert first.export is not None
    base = first.export
    ready = replace(recipe(*settings, "layout.precision=bf16"), model=model_table({"path": str(base)}))
    gauges: dict[str, float] = {}
    done = train_recipe(ready, home=home, device="cpu", watch=lambda report: gauges.update(report.gauges))
    assert done.export is not None
    found = load_file(done.run.folder / "adapter/4/adapter_model.safetensors")
    about = json.loads((done.run.folder / "adapter/4/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(base) and about["r"] == 2
    before, after = (load_file(folder / "model.safetensors") for folder in (base, done.export))
    for name, weight in before.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in found:
            change = found[f"{prefix}.lora_B.weight"] @ found[f"{prefix}.lora_A.weight"]
            assert float(change.norm()) > 0 and near(after[name].float(), weight + 2.0 * change, 4e-3)  # bf16
        else:
            assert torch.equal(after[name], weight.bfloat16()), name
    trained = sum(tensor.numel() for tensor in found.values())
    assert gauges["memory_master_bytes"] == 4 * trained
    assert gauges["memory_optimizer_bytes"] == pytest.approx(8 * trained, rel=0.05)
    frozen = 2 * sum(tensor.numel() for tensor in before.values())
    assert frozen <= gauges["memory_weights_bytes"] < 1.3 * frozen  # and copies that products are made with


def test_an_interrupted_run_goes_on_with_its_adapters(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    """Bit-equal to one that was not interrupted; checkpoints hold adapters and their states alone."""
    wanted = recipe(
        "train.steps=4",
        "train.save_every=2",
        "train.lora_rank=2",
        "train.lora_dropout=0.2",
        "train.lr=0.01",
        "train.profile_every=0",
    )
    homes = Home.at(tmp_path / "whole"), Home.at(tmp_path / "parts")
    whole = train_recipe(wanted, home=homes[0], device="cpu")

    def interrupt(report: StepReport) -> None:
        if report.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_recipe(wanted, home=homes[1], device="cpu", watch=interrupt)
    resumed = train_recipe(wanted, home=homes[1], device="cpu")
    assert resumed.resumed_at == 2
    first, second = (load_file(done.run.folder / "adapter/4/adapter_model.safetensors") for done in (whole, resumed))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    (about,) = resumed.run.checkpoint(4).rglob(".metadata")
    kept = FileSystemReader(about.parent).read_metadata().state_dict_metadata
    assert kept and all("lora_a" in name or "lora_b" in name for name in kept), list(kept)


def test_experts_that_stay_frozen_are_noted(home: Home, recipe: Callable[..., Recipe]) -> None:
    experts = [
        "model.family=mixtral",
        "model.ffn=0",
        "model.moe_every=1",
        "model.moe.num_experts=2",
        "model.moe.top_k=1",
        "model.moe.ffn=32",
    ]
    wanted = recipe(*experts, "train.lora_rank=2")
    notes = resolve_run(wanted, home, model_source(wanted, home)).plan.notes
    assert any("the experts of 2 layers carry no adapters" in note for note in notes), notes
