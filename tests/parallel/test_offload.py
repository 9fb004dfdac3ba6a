"""What waits on the host changes where numbers lie, never what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer, build
from armillary.parallel.host_memory import HostMemory, MappedFile
from armillary.parallel.offload import Activations, offload_activations
from armillary.parallel.recompute import recompute
from armillary.spec.layout import Layout
from armillary.spec.model import LayerKind
from armillary.training.parity.case import Case, Outcome, many, mixture, steps, tiny
from tests.ranks import Ranks

CPU = torch.device("cpu")


def same(found: Outcome, wanted: Outcome) -> None:
    assert found.losses == wanted.losses and found.norms == wanted.norms
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items())


@pytest.mark.parametrize("config", [tiny(), mixture()], ids=["dense", "experts"])
def test_one_process_trains_bit_for_bit_as_without(config: Any) -> None:
    case = Case(layout=Layout(precision="fp32"), config=config, accumulate=2, steps=3)
    wanted = steps(case)
    for changes in (dict(offload="both"), dict(offload="both", recompute="full"), dict(offload="nvme")):
        same(steps(replace(case, layout=replace(case.layout, **changes))), wanted)  # type: ignore[arg-type]


LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": dict(dp=2, offload="both"),
    "ZeRO-1": dict(dp=2, zero=1, offload="nvme"),
    "FSDP2": dict(dp=2, zero=3, offload="both"),
    "tp": dict(tp=2, offload="both"),
    "pp": dict(pp=2, offload="both"),
    "cp": dict(cp=2, offload="activations"),
    "ep × FSDP2": dict(dp=2, ep=2, zero=3, offload="both"),
}


@pytest.mark.slow
def test_ranks_train_bit_for_bit_as_without(ranks: Ranks) -> None:
    moved = [
        Case(
            layout=Layout(precision="fp32", **given),
            accumulate=4 if "pp" in given else 1,
            steps=3,
            config=mixture() if "ep" in given else tiny(),
        )
        for given in LAYOUTS.values()
    ]
    cases = [replace(case, layout=replace(case.layout, offload="none")) for case in moved]
    found = ranks.run(2, many, cases + moved)[0]
    for name, one, other in zip(LAYOUTS, found[: len(cases)], found[len(cases) :], strict=True):
        assert other.losses == one.losses, name
        same(other, one)


# --- activations by themselves


def model(layers: int = 4) -> tuple[Transformer, Activations]:
    made = build(tiny(layers=(LayerKind(),) * layers), dtype=torch.float32, device="cpu", seed=1)
    activations = offload_activations(made, CPU)
    activations.least_bytes = 1
    return made, activations


def forward(made: nn.Module) -> Tensor:
    tokens = torch.arange(32).view(2, 16) % 37
    return made(tokens, torch.arange(16).expand(2, 16), plain).square().sum()  # type: ignore[no-any-return]


def test_all_layers_but_the_last_wait_on_the_host_until_the_backward_pass() -> None:
    made, activations = model()
    loss = forward(made)
    out = activations.memory.bytes
    three, four = (forward(model(layers)[0]) for layers in (3, 4))
    assert out > 0 and three.isfinite() and four.isfinite()
    less, other = model(3)
    kept = forward(less)
    assert other.memory.bytes == pytest.approx(out * 2 / 3), "two of three layers, three of four"
    loss.backward()
    kept.backward()
    del loss, kept
    assert activations.memory.bytes == other.memory.bytes == 0, "nothing is left when the graph is gone"
    assert activations.memory.peak == out


def test_weights_stay_and_what_is_kept_twice_travels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, activations = model(2)
    original, sent = activations.memory.buffer_for, []
    monkeypatch.setattr(
        activations.memory, "buffer_for", lambda tensor: sent.append(tensor.data_ptr()) or original(tensor)
    )
    forward(made)
    assert len(sent) == len(set(sent)) > 5
    assert not set(sent) & {parameter.data_ptr() for parameter in made.parameters()}


@pytest.mark.slow
def test_compiled_blocks_find_what_they_kept_as_it_lay() -> None:
    case = Case(layout=Layout(precision="fp32"), steps=2, compile=True)
    same(steps(replace(case, layout=replace(case.layout, offload="both"))), steps(case))


def test_a_second_backward_pass_finds_them_again() -> None:
    made, _ = model(3)
    loss = forward(made)
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    loss.backward()
    assert first and all(torch.equal(p.grad, first[name]) for name, p in made.named_parameters() if p.grad is not None)


def test_passes_may_be_in_flight_together() -> None:
    made, _ = model(3)
    losses = [forward(made) for _ in range(3)]
    for loss in losses:
        loss.backward()
    other = build(made.config, dtype=torch.float32, device="cpu", seed=1)
    for _ in range(3):
        forward(other).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(made.parameters(), other.parameters(), strict=True) if q.grad is not None]
    assert len(pairs) == 20 and all(torch.equal(mine, wanted) for mine, wanted in pairs if mine is not None)


def test_recomputed_layers_send_their_inputs() -> None:
    made = build(tiny(layers=(LayerKind(),) * 3), dtype=torch.float32, device="cpu", seed=1)
    recompute(made, kind="full")
    activations = offload_activations(made, CPU)
    big = torch.arange(16 * 64).view(16, 64) % 37
    made(big, torch.arange(64).expand(16, 64), plain).sum().backward()
    assert activations.memory.peak == 2 * big.numel() * made.config.hidden * 4


# --- memory beside the device's


def test_host_memory_knows_its_own_and_counts_what_is_in_use() -> None:
    memory = HostMemory(CPU)
    like = memory.buffer_for(torch.ones(4, 6).t())
    lasting = memory.lasting(10, torch.float32)
    assert like.stride() == (1, 6) and memory.holds(like[1:]) and memory.holds(lasting) and not lasting.any()
    assert memory.bytes == 4 * 34 and not memory.holds(torch.ones(3))
    del like
    assert memory.bytes == 40 and memory.peak == 4 * 34


def test_a_mapped_file_keeps_what_is_written_whatever_the_system_is_told(tmp_path: Path) -> None:
    file = MappedFile(tmp_path, 5 * 4096)
    numbers, others = file.tensor(4096, 2000, torch.float32), file.tensor(4096 + 8000, 10, torch.float32)
    numbers.copy_(torch.arange(2000.0))
    others.fill_(7.0)
    file.release(4096, 4096 + 8000)
    file.prefetch(4096, 4096 + 8000)
    assert torch.equal(numbers, torch.arange(2000.0)) and (others == 7).all()
    assert not list(tmp_path.iterdir())
