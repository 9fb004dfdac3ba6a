"""Runs whose states or activations wait on the host: the same losses, and checkpoints that any run goes on from."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from armillary.errors import ArmillaryError
from armillary.model.layers.attention_forms import plain as attend
from armillary.model.low_precision.weights_16bit import Weights16Bit
from armillary.model.transformer import build
from armillary.spec.arithmetic.params import parameters
from armillary.spec.recipe import Recipe
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.training.loop import train
from armillary.training.parity.case import tiny
from armillary.training.step.host_adamw import HostAdamW
from armillary.training.step.offloaded_states import slices_of
from armillary.training.step.optimizer_offload import narrow, widen
from armillary.training.telemetry.step_telemetry import StepReport
from tests.training.checkpoint.test_checkpoint import begin, losses

Make = Callable[..., Recipe]
CPU = torch.device("cpu")


def test_losses_are_those_of_a_plain_run_and_what_is_out_is_said(recipe: Make, home: Home) -> None:
    common = ["train.steps=4", "train.eval_every=4", "layout.recompute=full"]
    plain = begin(recipe(*common), home)
    wanted = train(plain.plan, plain.create_run(), device="cpu")
    for out in ("both", "nvme"):
        begun = begin(recipe(*common, f"layout.offload={out}"), home)
        done = train(begun.plan, run := begun.create_run(), device="cpu")
        assert losses(run) == losses(wanted.run) and done.val_loss == wanted.val_loss
        last = list(read_gauges(run.gauges))[-1]
        assert last["offloaded_bytes"] > 12 * parameters(begun.plan.model).total and last["offload_s"] > 0
        assert done.export is not None and wanted.export is not None
        ours, theirs = ((folder / "model.safetensors").read_bytes() for folder in (done.export, wanted.export))
        assert ours == theirs
        assert {path.name for path in run.folder.iterdir()} == {path.name for path in wanted.run.folder.iterdir()}


TO_THE_HOST = pytest.param(("none", "optimizer", "none"), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "legs",
    [TO_THE_HOST, ("nvme", "none", "both")],
    ids="-".join,
)
def test_a_run_goes_on_with_the_same_bits_wherever_its_states_wait(
    legs: tuple[str, ...], recipe: Make, home: Home
) -> None:
    begun = begin(recipe("train.steps=6", "train.eval_every=0"), home)
    whole, run = begun.create_run(), begun.create_run()
    train(begun.plan, whole, device="cpu")
    for number, out in enumerate(legs):
        leg = begin(recipe("train.steps=6", "train.eval_every=0", f"layout.offload={out}"), home)
        train(leg.plan, run, watch=stop_after(2 * number + 1), device="cpu")
    assert losses(run) == losses(whole)


def stop_after(step: int) -> Callable[[StepReport], None]:
    def watch(report: StepReport) -> None:
        if report.step == step and step < 5:
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


# --- the optimiser by itself


def pair(folder: Path | None = None) -> tuple[nn.Module, nn.Module, HostAdamW, torch.optim.AdamW]:
    """Two models with the same weights, one stepped on the host and one where it is."""
    made = [build(tiny(), dtype=torch.float32, device="cpu", seed=1) for _ in range(2)]
    groups = [{"params": [p for p in made[0].parameters()], "weight_decay": 0.1}]
    host = HostAdamW(made[0], groups, device=CPU, folder=folder, lr=1e-2)
    return made[0], made[1], host, torch.optim.AdamW(made[1].parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def give_gradients(*models: nn.Module, seed: int) -> None:
    for model in models:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("in_file", [False, True])
def test_slices_of_any_size_are_stepped_alike(in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armillary.training.step.host_adamw.slices_of", lambda parameters: slices_of(parameters, 1000))
    ours, theirs, host, plain = pair(tmp_path if in_file else None)
    assert len(host.slices) > 3
    assert sum(piece.size for piece in host.slices) == sum(p.numel() for p in ours.parameters())
    versions = [parameter._version for parameter in ours.parameters()]
    for step in range(3):
        give_gradients(ours, theirs, seed=step)
        host.step(scale=torch.tensor(0.5))
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.5
        plain.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        mine, expected = host.state[one]["exp_avg_sq"], plain.state[other]["exp_avg_sq"]
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-9)
        assert float(host.state[one]["step"]) == 3
    assert all(p._version > old for p, old in zip(ours.parameters(), versions, strict=True)), "copies are made anew"


def test_a_step_runs_beside_the_next_forward_pass_whose_layers_wait_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armillary.training.step.host_adamw.slices_of", lambda parameters: slices_of(parameters, 1500))
    ours, theirs, host, plain = pair()
    host.overlap_with(ours)  # type: ignore[arg-type]
    go, original = threading.Event(), host.states.release
    monkeypatch.setattr(host.states, "release", lambda slice_: go.wait(20) and original(slice_))
    give_gradients(ours, theirs, seed=0)
    host.step()
    plain.step()
    old = next(iter(ours.parameters())).clone()
    assert torch.equal(old, next(iter(ours.parameters()))), "not stepped before it may"
    threading.Timer(0.2, go.set).start()
    tokens, positions = torch.arange(8).view(1, 8), torch.arange(8).view(1, 8)
    torch.testing.assert_close(ours(tokens, positions, attend), theirs(tokens, positions, attend))


def test_what_fails_beside_the_steps_is_raised_by_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, host, _ = pair()
    host.overlaps = True
    monkeypatch.setattr(host.states, "release", lambda slice_: 1 / 0)
    give_gradients(ours, seed=0)
    host.step()
    with pytest.raises(ZeroDivisionError):
        host.finish()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ArmillaryError, match=r"no room for .* GB of optimizer states in .*; free some, or --set"):
        pair(tmp_path)


def test_weights_of_products_may_be_narrow_while_their_fp32_form_is_on_the_host() -> None:
    ours, _, host, _ = pair()
    truth = {name: p.detach().clone() for name, p in ours.named_parameters()}
    narrow(ours, Weights16Bit(torch.bfloat16), summed=True)
    qkv = dict(ours.named_parameters())["blocks.0.attention.qkv.weight"]
    assert qkv.dtype == torch.bfloat16 and ours.embedding.weight.dtype == torch.float32  # type: ignore[union-attr]
    qkv.grad = torch.ones(qkv.shape)  # summed in fp32
    host.step()
    assert torch.equal(qkv.detach(), host.weight(qkv).bfloat16()), "the device's copy follows"
    assert not torch.equal(host.weight(qkv), truth["blocks.0.attention.qkv.weight"])
    widen(ours, host)
    assert qkv.dtype == torch.float32 and torch.equal(qkv, host.weight(qkv))


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("more", "outs"),
    [
        ((), ("none", "optimizer", "activations", "both", "nvme")),
        (("train.batch_tokens=2048",), ("none", "optimizer", "both")),
    ],
    ids=["one micro-batch", "two"],
)
def test_a_gpu_trains_alike_and_needs_less(
    more: tuple[str, ...], outs: tuple[str, ...], recipe: Make, home: Home
) -> None:
    """bf16 in whole blocks: the device keeps weights in 16 bits, so only AdamW's rounding differs."""
    shape = [
        "model.hidden=512",
        "model.heads=8",
        "model.kv_heads=4",
        "model.head_dim=64",
        "model.ffn=1536",
        "model.num_layers=8",
        "layout.precision=bf16",
        "train.sequence=128",
        "train.batch_tokens=1024",
        "layout.micro_batch=8",
        "train.steps=8",
        "train.eval_every=0",
        "train.lr=3e-4",
        "train.deterministic=true",
    ]
    found, peaks = {}, {}
    for out in outs:
        begun = begin(recipe(*shape, *more, f"layout.offload={out}"), home)
        train(begun.plan, run := begun.create_run(), device="cuda")
        found[out] = losses(run)
        records = list(read_gauges(run.gauges))
        names = ("weights", "master", "optimizer", "activations", "gradients", "loss")
        peaks[out] = {name: max(r.get(f"memory_{name}_bytes", 0.0) for r in records) for name in names}
        torch.cuda.empty_cache()
    for out, curve in found.items():
        assert curve == pytest.approx(found["none"], rel=2e-3), out
    if "activations" in outs:
        assert found["activations"] == pytest.approx(found["none"], rel=1e-6), "nothing is computed elsewhere"
    assert peaks["optimizer"]["optimizer"] == 0 and peaks["optimizer"]["master"] < 0.2 * peaks["none"]["master"]
    assert peaks["both"]["activations"] < 0.5 * peaks["none"]["activations"]
