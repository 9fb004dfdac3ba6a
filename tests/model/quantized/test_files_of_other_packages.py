"""Model folders that other packages wrote: dequantised as those packages do, bit for bit, and run as they run them.

Each package runs as a program of its own that knows nothing of armillary: `peer_programs/`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.kernels.core.agreement import relative_error
from armillary.model.quantized.packed_linear import loaded_bytes, packed_modules
from armillary.model.quantized.quantization_config import packed_reader
from armillary.model.quantized.stored import Stored
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import serve
from tests.model.quantized.folders import tiny_llama
from tests.model.quantized.peer_programs import write_auto_round, write_autoawq, write_gptqmodel, write_transformers
from tests.model.test_agreement import full_logits

pytestmark = pytest.mark.peers

TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "attention_bias": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with biases, and weights of one sign in a layer, so that zero points of 0 are needed."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("plain")
    model = tiny_llama(**SIZES)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    last = model.model.layers[1].mlp.down_proj.weight
    last.data[::2] = last.data[::2].abs()
    model.half().save_pretrained(folder)
    letters = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(96)}, unk_token=" "))
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, unk_token=" ").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """The folder that a program of `peer_programs` has filled; each runs once."""

    @cache
    def run(program: Any) -> Path:
        out = tmp_path_factory.mktemp(program.__name__.rpartition(".")[2])
        command = [sys.executable, program.__file__, str(plain), str(out)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=out)  # some log to files
        assert made.returncode == 0, made.stderr[-3000:]
        return out

    return run


def needs(module: str) -> Any:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed; run: make peers")


@needs("auto_round")
@pytest.mark.parametrize("name", write_auto_round.VARIANTS)
def test_auto_round(name: str, written: Callable[[Any], Path]) -> None:
    out = written(write_auto_round)
    compare(out / name, load_file(out / f"{name}.safetensors"))


@needs("awq")
@pytest.mark.parametrize("name", write_autoawq.VARIANTS)
def test_autoawq(name: str, written: Callable[[Any], Path]) -> None:
    out = written(write_autoawq)
    compare(out / name, load_file(out / f"{name}.safetensors"))


@needs("gptqmodel")
@pytest.mark.parametrize("name", write_gptqmodel.VARIANTS)
@torch.no_grad()
def test_gptqmodel(name: str, written: Callable[[Any], Path]) -> None:
    out = written(write_gptqmodel)
    theirs = load_file(out / f"{name}.safetensors")
    tokens, logits = theirs.pop("tokens"), theirs.pop("logits")
    compare(out / name, theirs)
    ours = full_logits(load_model(out / name, dtype="fp32", packed=True), tokens)
    assert relative_error(ours, logits) <= 2e-2  # theirs compute in fp16


@needs("accelerate")
@pytest.mark.parametrize("name", write_transformers.VARIANTS)
def test_transformers(name: str, written: Callable[[Any], Path]) -> None:
    out = written(write_transformers)
    compare(out / name, load_file(out / f"{name}.safetensors"))


@torch.no_grad()
def compare(folder: Path, theirs: dict[str, torch.Tensor]) -> None:
    """Weights, logits, tokens and memory of a folder; `theirs` are its weights as the package dequantises them."""
    packed = {name: as_read(folder, name, tuple(weight.shape)) for name, weight in theirs.items()}
    inverse = json.loads((folder / "config.json").read_text())["quantization_config"].get("weight_scale_semantics")
    for name, weight in theirs.items():
        if inverse:  # they divide, we multiply by the reciprocal
            torch.testing.assert_close(packed[name], weight, rtol=2**-22, atol=0)
        else:
            assert torch.equal(packed[name].to(weight.dtype), weight), name
    as_stored = load_model(folder, packed=True)
    assert len(packed_modules(as_stored)) >= 8
    assert loaded_bytes(as_stored) <= 1.05 * (folder / "model.safetensors").stat().st_size
    model = load_model(folder, dtype="fp32", packed=True)
    dense = with_weights(folder, packed)
    assert relative_error(full_logits(model, TOKENS), dense(TOKENS, use_cache=False).logits) <= 1e-5
    assert_greedy(folder, model, dense)


def as_read(folder: Path, name: str, shape: tuple[int, int]) -> torch.Tensor:
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    read = packed_reader(raw)
    assert read is not None
    weight = read(Stored(has=tensors.__contains__, read=tensors.__getitem__), name.removesuffix(".weight"), shape)
    assert weight is not None
    return weight.dequantised()


def with_weights(folder: Path, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' own model with these weights in fp32; all others as they are in the folder."""
    config = transformers.LlamaConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.LlamaForCausalLM(config).float().eval()
    stored = load_file(folder / "model.safetensors") | weights
    missing = model.load_state_dict({name: stored[name].float() for name in model.state_dict()})
    assert not missing.missing_keys
    return model


def assert_greedy(folder: Path, model: Any, dense: Any) -> None:
    """Every token of the packed weights in plain torch is transformers' own. Kernels for packed weights round inputs
    to 8 bits: where the engine's tokens part, transformers' two best logits are near."""
    prompts, new = TOKENS.tolist(), 8
    theirs = TOKENS
    for _ in range(new):
        best = dense(theirs, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        theirs = torch.cat([theirs, best], dim=1)
    requests = [ask(str(i), prompt, new, temperature=0.0, ignore_eos=True) for i, prompt in enumerate(prompts)]
    made = serve(model.config, model, requests)
    assert [prompt + list(each.tokens) for prompt, each in zip(prompts, made, strict=True)] == theirs.tolist()
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    engine = LLM(folder, Serve(kv_bytes=2_000_000, max_running=4, dtype="fp32"), device="cpu")
    for prompt, answer in zip(prompts, engine.generate(prompts, params), strict=True):
        logits = dense(torch.tensor([prompt + list(answer.tokens)]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        for token, row in zip(answer.tokens, logits, strict=True):
            assert row.max() - row[token] <= 0.02 * row.norm()
