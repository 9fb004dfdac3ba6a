"""GGUF files: blocks dequantised bit for bit as by the gguf package, models as they were, hostile files in one line."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import ArmillaryError, BadModel
from armillary.model.quantized.gguf_blocks import GgufBlocks
from armillary.model.quantized.packed_linear import packed_modules
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from armillary.store.gguf.gguf_header import BLOCKS, read_header
from armillary.store.gguf.local_folder import gguf_folder
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from tests.model.quantized.folders import tiny_llama
from tests.model.test_agreement import assert_close, full_logits

TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Q = gguf.GGMLQuantizationType


def gguf_name(name: str) -> str:
    module, _, end = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, number, rest = module.split(".", 3)
        return f"blk.{number}.{NAMES[rest]}.{end}"
    return f"{NAMES[module]}.{end}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders queries and keys of Llama."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def in_blocks(numbers: np.ndarray, kind: Q) -> np.ndarray:
    """As the gguf package quantizes them; for K-quants, which it only reads, random blocks of as many numbers."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(numbers, kind)
    width, block_bytes = BLOCKS[kind.name]
    raw = np.random.default_rng(3).integers(0, 256, (len(numbers), numbers.shape[1] // width, block_bytes), np.uint8)
    for at in SCALES_AT[kind.name]:
        raw[..., at + 1] &= 0x1B
    return raw.reshape(len(numbers), -1)


SCALES_AT = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2]}
"""bytes of a K-quant's block at which its fp16 scales begin"""


def write_gguf(path: Path, model: Any, arch: str, kinds: dict[str, Q], extra: dict[str, Any] | None = None) -> Path:
    """`kinds`: the type of each tensor by the end of its module's name; others are F32."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in (extra or {}).items():
        add[type(value)](key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            numbers = permuted(numbers, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        kind = next((kind for end, kind in kinds.items() if f"{end}.weight" in name), Q.F32)
        writer.add_tensor(gguf_name(name), in_blocks(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_are_dequantised_bit_for_bit(kind: str) -> None:
    """Random bytes, the fp16 scales kept finite."""
    numbers, block_bytes = BLOCKS[kind]
    raw = np.random.default_rng(3).integers(0, 256, (6, 512 // numbers, block_bytes), dtype=np.uint8)
    if numbers == 1:
        raw = np.random.default_rng(3).standard_normal((6, 512)).astype(np.float32)
        raw = raw if kind == "F32" else gguf.quants.quantize(raw, Q[kind])
    else:
        for at in SCALES_AT.get(kind, [0]):
            raw[..., at + 1] &= 0x3B
    rows = raw.reshape(6, -1).view(np.uint8)
    expected = gguf.quants.dequantize(rows if numbers > 1 else raw, Q[kind]).reshape(6, 512)
    found = GgufBlocks(kind=kind).dequantise({"blocks": torch.from_numpy(rows.copy())})
    assert np.array_equal(found.numpy(), expected, equal_nan=False)


MIXED = {"q_proj": Q.Q4_0, "k_proj": Q.Q4_0, "v_proj": Q.Q8_0, "o_proj": Q.Q8_0, "gate_proj": Q.Q4_0}
MIXED |= {"up_proj": Q.Q4_0, "down_proj": Q.F16, "embed_tokens": Q.Q8_0}


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@torch.no_grad()
def test_models_are_those_the_files_were_made_from(arch: str, tmp_path: Path) -> None:
    """Logits against transformers with the gguf package's own dequantised weights, tied and not."""
    if arch == "llama":
        theirs = tiny_llama(tie_word_embeddings=True)
    else:
        config = tiny_llama().config.to_dict()
        fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        fields += ("num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range")
        theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{key: config[key] for key in fields})).eval()
    path = write_gguf(tmp_path / "m.gguf", theirs, arch, MIXED)
    for name, parameter in theirs.named_parameters():
        kind = next((kind for end, kind in MIXED.items() if f"{end}.weight" in name), Q.F32)
        back = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
        parameter.copy_(torch.from_numpy(back.reshape(parameter.shape)))
    source = resolve_model(str(path), Home.at(tmp_path), need_weights=True)
    assert source.folder is not None and source.config.tied == (arch == "llama")
    model = load_model(source.folder, dtype="fp32", packed=True)
    assert_close(full_logits(model, TOKENS), theirs(TOKENS, use_cache=False).logits)
    assert_close(full_logits(load_model(source.folder, dtype="fp32"), TOKENS), theirs(TOKENS, use_cache=False).logits)
    held = sum(each.nbytes for each in load_model(source.folder, dtype="fp16", packed=True).parameters())
    held += sum(module.weight.nbytes for module in packed_modules(model))
    assert held <= 1.05 * path.stat().st_size
    llm = LLM(path, Serve(kv_bytes=200_000, max_running=4, dtype="fp32"), home=Home.at(tmp_path), device="cpu")
    found = llm.generate(TOKENS.tolist(), SamplingParams(temperature=0.0, max_tokens=1))
    assert [made.tokens[0] for made in found] == theirs(TOKENS, use_cache=False).logits[:, -1].argmax(-1).tolist()


def test_byte_level_tokenizers_are_as_they_were(tmp_path: Path) -> None:
    trained = train_tokenizer(["def main():\n    return 0  # über 100 Ωs\n"] * 20, 300)
    trained.save(tmp_path / "t")
    own = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "t" / "tokenizer.json"))
    bpe = json.loads((tmp_path / "t" / "tokenizer.json").read_text())["model"]
    texts = [text for text, _ in sorted(own.get_vocab().items(), key=lambda item: item[1])]
    special = set(own.all_special_tokens) | set(own.get_added_vocab())
    extra = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text in texts],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in bpe["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    model = tiny_llama(vocab_size=len(texts), num_hidden_layers=1)
    folder = gguf_folder(write_gguf(tmp_path / "m.gguf", model, "llama", {}, extra), Home.at(tmp_path))
    found = Tokenizer.load(folder)
    for text in ("def main(): return 1", "über Ω  0\n\n x's", ""):
        assert found.encode(text) == trained.encode(text) and found.decode(found.encode(text)[1:]) == text


def test_sentencepiece_merges_the_highest_score_first(tmp_path: Path) -> None:
    """Against SentencePiece's rule, written out: the best pair of neighbours, the leftmost of equals."""
    letters = ["▁", "a", "b", "c"]
    words = ["▁a", "ab", "bc", "abc", "▁ab", "ca", "cab"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    scores = [0.0] * (259 + len(letters)) + [-1.0, -4.0, -2.0, -3.0, -5.0, -2.5, -6.0]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(letters) + len(words))
    extra = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    model = tiny_llama(vocab_size=len(texts), num_hidden_layers=1)
    folder = gguf_folder(write_gguf(tmp_path / "m.gguf", model, "llama", {}, extra), Home.at(tmp_path))
    found = Tokenizer.load(folder)
    number = {text: i for i, text in enumerate(texts)}

    def merged(text: str) -> list[int]:
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            joined = [a + b for a, b in pairwise(parts)]
            pairs = [(scores[number[text]], -i) for i, text in enumerate(joined) if text in number]
            if not pairs:
                return [1, *(number[part] for part in parts)]
            at = -max(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    for text in ("abcab", "cabbc abc", "aabbcc", "bcabc ca", "a  b"):
        assert found.encode(text) == merged(text), text
        assert found.decode(found.encode(text)[1:]) == text
    assert found.encode("aé")[1:] == [number["▁a"], number["<0xC3>"], number["<0xA9>"]]


def test_hostile_files_are_one_line(tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "m.gguf", tiny_llama(num_hidden_layers=1), "llama", MIXED).read_bytes()
    header = read_header(tmp_path / "m.gguf")
    end = min(tensor.begin for tensor in header.tensors.values())
    path = tmp_path / "bad.gguf"

    def refused(content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(ArmillaryError) as error:
            load_model(gguf_folder(path, Home.at(tmp_path)), packed=True)
        assert "\n" not in str(error.value)

    for length in (0, 3, 4, 20, end // 2, end - 1, end + 10, len(good) - 1):
        refused(good[:length])
    refused(b"GGML" + good[4:])
    huge = struct.pack("<Q", 2**63)
    for at in (8, 16, 24):  # tensors, values, length of the first key
        refused(good[:at] + huge + good[at + 8 :])
    name = good.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    refused(good[:name] + struct.pack("<I", 200) + good[name + 4 :])  # dims
    refused(good[: name + 4] + huge + good[name + 12 :])  # size of a dim
    refused(good[: name + 4] + struct.pack("<QQ", 64, 32) + good[name + 20 :])  # another shape
    refused(good[: name + 20] + struct.pack("<I", 99) + good[name + 24 :])  # type
    refused(good[: name + 24] + struct.pack("<q", -64) + good[name + 32 :])  # offset
    key = good.index(b"llama.block_count") + len(b"llama.block_count") + 4
    refused(good[:key] + struct.pack("<I", 2) + good[key + 4 :])  # more layers than there are


def test_random_damage_never_ends_in_anything_but_one_line(tmp_path: Path) -> None:
    good = bytearray(write_gguf(tmp_path / "m.gguf", tiny_llama(num_hidden_layers=1), "llama", MIXED).read_bytes())
    end = min(tensor.begin for tensor in read_header(tmp_path / "m.gguf").tensors.values())
    pick = np.random.default_rng(5)
    path = tmp_path / "bad.gguf"
    for _ in range(60):
        content = good.copy()
        for at in pick.integers(0, end, 3):
            content[at] = pick.integers(0, 256)
        path.write_bytes(content)
        try:
            read_header(path)
        except BadModel as error:
            assert "\n" not in str(error)
