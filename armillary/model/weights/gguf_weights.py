"""The tensors of a GGUF file by their Hugging Face names, packed as they are in the file."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from armillary.errors import BadModel
from armillary.model.quantized.gguf_blocks import GgufBlocks
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.stored import Stored
from armillary.spec.model import ModelConfig
from armillary.store.gguf.gguf_header import GgufTensor, read_header

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IGNORED = ("rope_freqs.weight",)  # part of the config
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The part of `TensorFolder` that packed models are loaded through."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._header, self._config = read_header(path), config
        tensors = self._header.tensors
        self._names = {_hf_name(name): name for name in tensors if name not in _IGNORED}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> Iterator[str]:
        return iter(self._names)

    def total_bytes(self) -> int:
        return self._header.weight_bytes

    def is_plain(self, name: str) -> bool:
        return name in self._names and self._tensor(name).kind in _FLOATS

    def read_any(self, name: str) -> Tensor:
        """Floats as they are; of packed tensors the bytes of each row."""
        tensor = self._tensor(name)
        with open(self._header.path, "rb") as file:
            file.seek(tensor.begin)
            content = torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=torch.uint8)
        if len(content) < tensor.nbytes:
            raise BadModel(f"{self._header.path} ends inside {name}; fetch it again")
        if tensor.kind in _FLOATS:
            return self._in_order(name, content.view(_FLOATS[tensor.kind]).view(tensor.shape))
        return self._in_order(name, content.view(tensor.shape[0], -1))

    def read_module(self, stored: Stored, module: str, shape: tuple[int, int]) -> PackedRows | None:
        """A matrix whose blocks stay as they are."""
        name = f"{module}.weight"
        if name not in self or self.is_plain(name):
            return None
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise BadModel(
                f"{self._header.path}: {self._names[name]} has shape {list(tensor.shape)} where its metadata says "
                f"{list(shape)}; fetch it again"
            )
        rows = {"blocks": stored.get(name, torch.uint8)}
        return PackedRows(format=GgufBlocks(kind=tensor.kind), rows=rows, columns=shape[1])

    def _tensor(self, name: str) -> GgufTensor:
        return self._header.tensors[self._names[name]]

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """llama.cpp stores the queries and keys of Llama with the two halves of each head interleaved."""
        if not (heads := _interleaved_heads(name, rows, self._config)):
            return rows
        return rows.unflatten(0, (heads, self._config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def in_file_order(name: str, rows: Tensor, config: ModelConfig) -> Tensor:
    """The rows of a Hugging Face tensor as a file has them: the inverse of reading."""
    if not (heads := _interleaved_heads(name, rows, config)):
        return rows
    return rows.unflatten(0, (heads, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _interleaved_heads(name: str, rows: Tensor, config: ModelConfig) -> int:
    """Heads of a tensor that a file has in another order; 0 where it has not."""
    heads = config.heads if ".q_proj." in name else config.kv_heads if ".k_proj." in name else 0
    is_llama = config.family in ("llama", "mistral")  # whose files say llama
    return heads if is_llama and heads and len(rows) == heads * config.head_dim else 0


def gguf_name(hf_name: str) -> str:
    """The inverse of `_hf_name`."""
    module, _, end = hf_name.rpartition(".")
    names = {value: key for key, value in _NAMES.items()}
    if module.startswith("model.layers."):
        _, _, number, rest = module.split(".", 3)
        return f"blk.{number}.{names[rest]}.{end}"
    return f"{names[module]}.{end}"


def _hf_name(name: str) -> str:
    """Of a tensor; unknown names stay."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _NAMES:
        return f"{_NAMES[parts[0]]}.{parts[1]}"
    return name
