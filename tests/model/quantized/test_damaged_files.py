"""Damaged and hostile model files in every format: they load, or end in one line; nothing crashes, nothing takes
gigabytes."""

from __future__ import annotations

import copy
import json
import re
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from armillary.errors import ArmillaryError
from armillary.model.weights.hf_weights import load_model
from armillary.store.gguf.gguf_header import read_header
from armillary.store.gguf.local_folder import gguf_folder
from armillary.store.home import Home
from tests.model.quantized.folders import FOLDERS, fp8_folder, gptq_folder, nf4_folder, tiny_llama
from tests.model.test_agreement import full_logits
from tests.model.weights.test_gguf_weights import MIXED, write_gguf

_SPARE = 2 << 30  # bytes of address space that a load may take on top of what the process has
VALUES = (0, 1, -1, 3, 7, 2**31 - 1, 2**40, 10**30, 0.5, float("nan"), 1e308, True, None, "", "x", [], [1, 2], {})


@contextmanager
def little_memory() -> Iterator[None]:
    """Allocations of gigabytes fail in here, whether they are touched or not."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _SPARE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def load(path: Path, home: Path) -> str:
    """Empty where it loads, and then runs, or the error's line; anything else is raised."""
    try:
        with little_memory(), torch.no_grad():
            folder = gguf_folder(path, Home.at(home)) if path.suffix == ".gguf" else path
            model = load_model(folder, packed=True)
            full_logits(model, torch.arange(8)[None] % model.config.vocab)
    except ArmillaryError as error:
        assert "\n" not in str(error) and str(error)
        return str(error)
    return ""


def fresh(folder: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def flipped(content: bytes, pick: np.random.Generator, most: int) -> bytes:
    """With one to four bytes before `most` replaced, or cut there."""
    damaged = bytearray(content)
    if pick.random() < 0.1:
        return bytes(damaged[: pick.integers(0, len(damaged))])
    for at in pick.integers(0, most, pick.integers(1, 5)):
        damaged[at] = pick.integers(0, 256)
    return bytes(damaged)


def some_place(value: Any, pick: np.random.Generator) -> tuple[Any, Any]:
    """A table or list inside `value`, and a key of it."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[pick.integers(len(keys))]
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or pick.random() < 0.15:
            return value, key
        value = inner


def replaced(raw: dict[str, Any], pick: np.random.Generator) -> dict[str, Any]:
    """With one value of another kind or size, or without it."""
    raw = copy.deepcopy(raw)
    table, key = some_place(raw, pick)
    if pick.random() < 0.2:
        del table[key]
    else:
        table[key] = VALUES[pick.integers(len(VALUES))]
    return raw


def damaged_folder(good: Path, target: Path, pick: np.random.Generator) -> Path:
    folder = fresh(good, target)
    content = (good / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    match pick.integers(4):
        case 0:
            (folder / "model.safetensors").write_bytes(flipped(content, pick, 8 + size))
        case 1:
            header = replaced(json.loads(content[8 : 8 + size]), pick)
            text = json.dumps(header).encode()
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
        case 2:
            (folder / "config.json").write_bytes(flipped((good / "config.json").read_bytes(), pick, 400))
        case _:
            raw = json.loads((good / "config.json").read_text())
            if pick.random() < 0.6:
                raw["quantization_config"] = replaced(raw["quantization_config"], pick)
            (folder / "config.json").write_text(json.dumps(raw if pick.random() < 0.6 else replaced(raw, pick)))
    return folder


def damage_folders(name: str, tmp_path: Path, times: int, seed: int) -> None:
    good = FOLDERS[name](tmp_path / "good", tiny_llama(num_hidden_layers=1))
    assert load(good, tmp_path) == ""
    for i in range(times):
        pick = np.random.default_rng((seed, i))
        folder = damaged_folder(good, tmp_path / "bad", pick)
        try:
            load(folder, tmp_path)
        except Exception as error:
            pytest.fail(f"{name}, damage {seed, i}: {error!r}")


@pytest.mark.parametrize("name", FOLDERS)
def test_damaged_folders(name: str, tmp_path: Path) -> None:
    damage_folders(name, tmp_path, times=6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_much_damage(name: str, tmp_path: Path) -> None:
    damage_folders(name, tmp_path, times=400, seed=2)


def damage_gguf(tmp_path: Path, times: int, seed: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(num_hidden_layers=1), "llama", MIXED, TOKENIZER)
    good, bad = path.read_bytes(), tmp_path / "bad.gguf"
    assert load(path, tmp_path) == ""
    end = min(tensor.begin for tensor in read_header(path).tensors.values())
    for i in range(times):
        bad.write_bytes(flipped(good, np.random.default_rng((seed, i)), end))
        try:
            load(bad, tmp_path)
        except Exception as error:
            pytest.fail(f"GGUF, damage {seed, i}: {error!r}")


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*(chr(33 + i) for i in range(95)), "!#"],
    "tokenizer.ggml.merges": ["! #"],
    "tokenizer.ggml.bos_token_id": 1,
}


def test_damaged_gguf(tmp_path: Path) -> None:
    damage_gguf(tmp_path, times=40, seed=1)


@pytest.mark.slow
def test_much_damaged_gguf(tmp_path: Path) -> None:
    damage_gguf(tmp_path, times=4000, seed=2)


def test_absurd_numbers_in_gguf_take_no_memory(tmp_path: Path) -> None:
    """Whole fields, which random bytes rarely hit: counts, sizes, an alignment of 0."""
    path = tmp_path / "m.gguf"
    absurd = (0, 2**31 - 1, 2**32 - 1)
    for key in ("block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"):
        for value in absurd:
            write_gguf(path, tiny_llama(num_hidden_layers=1), "llama", MIXED)
            content = bytearray(path.read_bytes())
            at = content.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
            content[at : at + 4] = struct.pack("<I", value)
            path.write_bytes(content)
            assert load(path, tmp_path) or (key, value) == ("context_length", 2**31 - 1), (key, value)
    write_gguf(path, tiny_llama(num_hidden_layers=1), "llama", MIXED, {"general.alignment": 0})
    assert "alignment of 0" in load(path, tmp_path)


@pytest.mark.parametrize("layers", [10**6, 10**12])
def test_a_config_of_more_layers_than_there_are_takes_no_memory(layers: int, tmp_path: Path) -> None:
    folder = gptq_folder(tmp_path / "m", tiny_llama(num_hidden_layers=1))
    raw = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(raw))
    assert "layers" in load(folder, tmp_path)


def edited(folder: Path, **quantization: Any) -> Path:
    """With other values in quantization_config."""
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= quantization
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("bits", [4.0, 8.0, True, "4", [4], None, 3, 10**400])
def test_bits_are_whole_numbers(bits: Any, tmp_path: Path) -> None:
    folder = edited(gptq_folder(tmp_path / "m", tiny_llama(num_hidden_layers=1)), bits=bits)
    assert "bits are not supported" in load(folder, tmp_path)


def test_blocks_larger_than_a_weight_take_no_memory(tmp_path: Path) -> None:
    """All rows and columns of a weight are one block then, as where blocks of 128 are larger than it."""
    folder = fp8_folder(tmp_path / "m", tiny_llama(num_hidden_layers=1))
    assert load(edited(folder, weight_block_size=[10**9, 10**9]), tmp_path) == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("shape", shape) for shape in (5, None, {"a": 1}, [64])),
        *(("nested_offset", offset) for offset in (10**400, float("nan"), True, "x")),
        *(("blocksize", size) for size in (0, 64.0, 10**9, "64")),
        ("nested_blocksize", 0),
    ],
)
def test_states_of_bitsandbytes_are_checked(key: str, value: Any, tmp_path: Path) -> None:
    folder = nf4_folder(tmp_path / "m", tiny_llama(num_hidden_layers=1))
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if "quant_state" in each]:
        state = json.loads(bytes(tensors[name].tolist())) | {key: value}
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    assert re.search("has shape|blocks of|state is incomplete", load(folder, tmp_path))


@pytest.mark.parametrize(
    "target", ["(a+)+$", "(?:.*)*z", ".*e.*e.*e.*e.*e.*z", "(((", "x{99999999999}", "a" * 10**6, "(?x)#[\n(a+)+$#]"]
)
def test_targets_that_take_forever_are_refused(target: str, tmp_path: Path) -> None:
    folder = FOLDERS["int8 per row"](tmp_path / "m", tiny_llama(num_hidden_layers=1))
    scheme = {"targets": [f"re:{target}"], "weights": {"num_bits": 8}}
    found = load(edited(folder, config_groups={"g": scheme}), tmp_path)
    assert re.search("repeats too much|is no pattern", found) and len(found) < 300
    scheme["targets"] = [r"re:.*model\.layers\.\d+\.(self_attn|mlp)\..*_proj$"]
    assert load(edited(folder, config_groups={"g": scheme}), tmp_path) == ""


def test_a_config_of_more_weights_than_the_files_have_bits(tmp_path: Path) -> None:
    folder = gptq_folder(tmp_path / "m", tiny_llama(num_hidden_layers=1))
    raw = json.loads((folder / "config.json").read_text()) | {"head_dim": 2**33}
    (folder / "config.json").write_text(json.dumps(raw))
    assert "of weights are too few" in load(folder, tmp_path)
