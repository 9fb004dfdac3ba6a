"""The engine with the kernels of GPUs for packed weights: the tokens of the same weights in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch

from armillary.engine.runner.executor import FastExecutor
from armillary.model.quantized import packed_kernels
from armillary.model.quantized.packed_linear import packed_modules
from armillary.model.quantized.packed_rows import FusedRows, PackedRows
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import serve
from tests.kernels.interpreter import needs_interpreter
from tests.model.quantized.folders import int8_folder, tiny_llama
from tests.model.quantized.test_packed_kernels import gguf, nf4

WIDTH = 256
MAKES: tuple[Callable[[int, int], PackedRows], ...] = (
    nf4,
    partial(gguf, "Q4_0", largest=0.02),
    partial(gguf, "Q4_K", largest=4e-4),
    partial(gguf, "Q6_K", largest=8e-5),
)
"""numbers of about 0.05 each"""


def small_model(folder: Path, device: str = "cpu") -> Transformer:
    """A small Llama in fp16 whose linear layers have random weights, each in another format."""
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
    }
    if not folder.exists():
        int8_folder(folder, tiny_llama(**sizes))
    model = load_model(folder, packed=True, dtype="fp16", device=device).eval()
    torch.manual_seed(7)
    for linear, make in zip(packed_modules(model), cycle(MAKES), strict=False):
        (part,) = linear.weight.parts
        linear.weight = FusedRows(parts=(make(part.num_rows, part.columns).to(torch.device(device)),))
    return model


@needs_interpreter
@torch.inference_mode()
def test_tokens_are_those_of_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.kernels.quantized.weight_only_triton import weight_only_linear

    monkeypatch.setattr(packed_kernels, "_chosen", lambda case: weight_only_linear)
    prompts = [ask("a", [2, 3, 4], 3, temperature=0.0)]
    plainly, fast = (small_model(tmp_path / "m") for _ in range(2))
    before = sum(linear.weight.nbytes for linear in packed_modules(fast))
    for linear in packed_modules(fast):
        linear.use_kernels(torch.float16)
        assert linear.kernels[0] is not None
    assert sum(linear.weight.nbytes for linear in packed_modules(fast)) <= 1.05 * before
    right = serve(plainly.config, plainly, prompts, executor=FastExecutor)
    found = serve(fast.config, fast, prompts, executor=FastExecutor)
    assert [made.tokens for made in found] == [made.tokens for made in right]


@pytest.mark.gpu
@torch.inference_mode()
def test_tokens_on_a_gpu(tmp_path: Path) -> None:
    """With graphs and the engine's own choice of kernels."""
    prompts = [ask("a", [2, 3, 4], 12, temperature=0.0), ask("b", [*range(2, 90)], 9, temperature=0.0)]
    plainly, fast = (small_model(tmp_path / "m", "cuda") for _ in range(2))
    found = serve(fast.config, fast, prompts, executor=FastExecutor, max_tokens_per_step=128)
    assert all(linear.kernels[0] is not None for linear in packed_modules(fast))
    right = serve(plainly.config, plainly, prompts)
    assert [made.tokens for made in found] == [made.tokens for made in right]
