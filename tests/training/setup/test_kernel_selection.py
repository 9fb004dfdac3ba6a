"""A model with its kernels set trains as the plain one does; on a CPU they run in Triton's interpreter, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from armillary.kernels.optimizer.adamw import AdamW
from armillary.model.layers.attention_forms import packed, plain
from armillary.model.transformer import Transformer, build
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.training.data.batch import IGNORED
from armillary.training.setup.kernel_selection import Choices, use_kernels
from armillary.training.step.loss import loss_sum
from tests.kernels.interpreter import needs_interpreter
from tests.model.layers.test_attention_forms import randomised, small

JOB = TrainJob(sequence=16, batch_tokens=16)
LAYOUT = Layout(micro_batch=1, precision="fp32")
OURS = dict.fromkeys(
    (
        "norm",
        "add_norm",
        "head_norm",
        "activate",
        "rope",
        "linear_cross_entropy",
        "attention",
        "attention, documents",
        "attention, window 5",
        "attention, window 5, documents",
    ),
    "triton",
)
MODELS = {
    "llama": small(),
    "window": small(attention_pattern=["sliding", "full"], window=5),
    "qk norm": small(num_layers=1, qk_norm="head"),
    "softcaps, tied": small(num_layers=1, attention_softcap=2.0, logit_softcap=3.0, tied=True, logit_scale=0.5),
    "alibi, layer norm": small(positions="alibi", norm="layer", norm_bias=True, gated=False, activation="gelu"),
    "experts": small(num_layers=1, moe={"num_experts": 4, "top_k": 2, "ffn": 16}),
    "norms on both sides": small(num_layers=1, norm_at="both", norm_plus_one=True),
}


def data(documents: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(5)
    tokens, targets = torch.randint(0, 50, (1, 16)), torch.randint(0, 50, (1, 16))
    targets[:, ::5] = IGNORED
    numbers = torch.tensor([[0] * 6 + [1] * 10]) if documents else None
    return tokens, targets, torch.arange(16)[None], numbers


def step(model: Transformer, choices: Choices | None, documents: bool) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, targets, positions, numbers = data(documents)
    attend: Callable[..., Tensor] = plain if numbers is None else packed(numbers)
    loss = loss_sum
    if choices is not None:
        attend, loss = choices.attend(numbers), choices.loss
    hidden = model(tokens, positions, attend)
    total = loss(model, hidden, targets, chunk=8)
    total.backward()
    return total.detach(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-9))


CASES = [
    ("llama", True, "fused"),
    ("experts", True, "fused"),
    ("qk norm", False, "layers"),
    *(pytest.param(name, True, "fused", marks=pytest.mark.slow) for name in MODELS if name not in ("llama", "experts")),
    pytest.param("llama", False, "layers", marks=pytest.mark.slow),
    pytest.param("qk norm", False, "fused", marks=pytest.mark.slow),
    pytest.param("qk norm", True, "layers", marks=pytest.mark.slow),
]
"""by default a model of each kind of block; what else fused blocks have is in tests/model/fused"""


@needs_interpreter
@pytest.mark.parametrize(("name", "documents", "block"), CASES)
def test_loss_and_gradients_are_the_plain_ones(name: str, documents: bool, block: str) -> None:
    plain_model: Transformer = randomised(MODELS[name]).float()
    model = copy.deepcopy(plain_model)
    choices = use_kernels(model, job=JOB, layout=LAYOUT, names=OURS | {"block": block})
    assert choices.names["norm"] == "triton" and choices.names["block"] == block
    expected, expected_grads = step(plain_model, None, documents)
    loss, grads = step(model, choices, documents)
    assert far(loss, expected) < 1e-6
    assert grads.keys() == expected_grads.keys()
    assert max(far(grads[key], expected_grads[key]) for key in grads) < 2e-5


@needs_interpreter
@pytest.mark.parametrize("batch_tokens", [pytest.param(16, marks=pytest.mark.slow), 32])
def test_bf16_is_as_near_to_fp32_as_autocast_is(batch_tokens: int) -> None:
    """With one micro-batch a step gradients of matrices are bf16 themselves, with two they are summed in fp32."""
    exact_model: Transformer = randomised(small(num_layers=1)).float()
    cast_model, model = copy.deepcopy(exact_model), copy.deepcopy(exact_model)
    job, layout = replace(JOB, batch_tokens=batch_tokens), replace(LAYOUT, precision="bf16")
    choices = use_kernels(model, job=job, layout=layout, names=OURS | {"block": "fused"})
    exact, exact_grads = step(exact_model, None, False)
    with torch.autocast("cpu", torch.bfloat16):
        cast, cast_grads = step(cast_model, None, False)
        loss, grads = step(model, choices, False)
    assert far(loss, exact) < max(2e-3, 2 * far(cast, exact))
    for key in exact_grads:
        assert far(grads[key], exact_grads[key]) < max(2e-2, 2 * far(cast_grads[key], exact_grads[key])), key
    narrow = model.blocks["0"].mlp.up.weight.grad
    assert narrow is not None and narrow.dtype == (torch.bfloat16 if batch_tokens == 16 else torch.float32)
    assert choices.copies and all(copy.dtype == torch.bfloat16 for copy in choices.copies.values())


@needs_interpreter
def test_a_remembered_form_is_left_where_the_layout_cannot_have_it() -> None:
    """A run may go on in another precision: fp16 has no fused blocks, fp8 none without units for it."""
    for precision, form in (("bf16", "fused"), ("fp16", "layers"), ("fp8", "layers")):
        layout = replace(LAYOUT, precision=precision)
        model: Transformer = randomised(small()).float()
        choices = use_kernels(model, job=JOB, layout=layout, names=OURS | {"block": "fused"})
        assert choices.names["block"] == form and (model.blocks["0"].fused is None) == (form == "layers")


def test_a_cpu_keeps_the_plain_forms() -> None:
    model: Transformer = randomised(small()).float()
    choices = use_kernels(model, job=JOB, layout=LAYOUT)
    assert choices.names == {} and choices.loss is loss_sum and model.blocks["0"].fused is None
    assert far(step(model, choices, True)[0], step(randomised(small()).float(), None, True)[0]) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu(name: str, precision: str) -> None:
    """Chosen without timing, so that the test is quick; and the names choose the same again."""
    config: ModelConfig = MODELS[name]
    exact: Transformer = randomised(config).float()
    model = copy.deepcopy(exact).cuda()
    layout = replace(LAYOUT, precision=precision)
    choices = use_kernels(model, job=JOB, layout=layout, timed=False)
    again = use_kernels(copy.deepcopy(exact).cuda(), job=JOB, layout=layout, names=choices.names)
    assert again.names == choices.names
    tokens, targets, positions, numbers = (x if x is None else x.cuda() for x in data(True))
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        hidden = model(tokens, positions, choices.attend(numbers))
        loss = choices.loss(model, hidden, targets, chunk=8)
    loss.backward()
    expected, grads = step(exact, None, True)
    plain_model: Transformer = randomised(config).float().cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        hidden = plain_model(tokens, positions, packed(numbers))
        loss_sum(plain_model, hidden, targets, chunk=8).backward()
    assert far(loss.detach().cpu(), expected) < (1e-5 if precision == "fp32" else 2e-2)
    ours, theirs = (
        max(far(p.grad.float().cpu(), grads[key]) for key, p in each.named_parameters() if p.grad is not None)
        for each in (model, plain_model)
    )
    assert ours < max(1e-3 if precision == "fp32" else 2e-2, 2 * theirs)


@pytest.mark.gpu
def test_ten_steps_on_a_gpu_follow_the_plain_ones() -> None:
    """Kernels, half-precision copies and AdamW in one pass, against autocast and torch's AdamW on the same data."""
    config = small(hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512)
    torch.manual_seed(0)
    tokens, targets = (torch.randint(0, 512, (2, 16), device="cuda") for _ in range(2))
    positions = torch.arange(16, device="cuda").expand(2, -1)
    curves = []
    for kernels in (False, True):
        model = build(config, dtype=torch.float32, device="cuda", seed=1)
        layout = replace(LAYOUT, precision="bf16")
        choices = use_kernels(model, job=JOB, layout=layout, timed=False) if kernels else None
        kind = AdamW if kernels else torch.optim.AdamW
        more = {"copies": choices.copies} if choices else {}
        optimizer = kind(model.parameters(), lr=3e-3, betas=(0.9, 0.95), **more)
        losses = []
        for _ in range(10):
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model(tokens, positions, choices.attend(None) if choices else plain)
                loss = (choices.loss if choices else loss_sum)(model, hidden, targets, chunk=0) / targets.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        curves.append(losses)
    assert curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=2e-2)


@pytest.mark.gpu
def test_timed_candidates_leave_no_memory_on_a_gpu() -> None:
    """They ran on streams of their own, for each of which torch kept 32 MB for cuBLAS: hundreds in all."""
    model: Transformer = randomised(small(hidden=128, heads=2, kv_heads=1, head_dim=64, ffn=256)).cuda()
    before = torch.cuda.memory_allocated()
    use_kernels(model, job=JOB, layout=replace(LAYOUT, precision="bf16"))
    assert torch.cuda.memory_allocated() - before < 16 << 20
