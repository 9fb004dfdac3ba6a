"""What train_one_gpu.py measures ours against, and the tokens it is measured on.

The peers are Hugging Face's Llama, eager or compiled, and a Llama in plain torch (plain_llama.py), all in bf16 with
torch's fused AdamW over bf16 states and no clipping.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from armillary.spec.model import ModelConfig

SEQUENCE = 4096


def drawn(config: ModelConfig, rows: int, count: int = 64, sequence: int = SEQUENCE) -> list[Tensor]:
    """Random tokens, more batches than there are steps: nothing is learnt by heart."""
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (rows, sequence + 1)
    return [torch.randint(0, config.vocab, shape, device="cuda", generator=generator) for _ in range(count)]


def words(config: ModelConfig, rows: int, count: int = 64) -> list[Tensor]:
    """Words of this machine's Python library, numbered by how often they occur; rare ones share a number."""
    need, found = count * rows * (SEQUENCE + 1), []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if len(found) < need and "site-packages" not in path.parts:
            found += re.findall(r" ?[A-Za-z]+|[0-9]|\n *|[^A-Za-z0-9\s]", path.read_text(errors="replace"))
    number = {word: at for at, (word, _) in enumerate(Counter(found).most_common(config.vocab - 1))}
    ids = torch.tensor([number.get(word, config.vocab - 1) for word in found[:need]], device="cuda")
    return list(ids[: len(ids) // (rows * (SEQUENCE + 1)) * rows * (SEQUENCE + 1)].view(-1, rows, SEQUENCE + 1))


class Peer:
    """Somebody else's model with torch's fused AdamW over states of its own format, which clips nothing."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig, rows: int, loss_of: Callable[..., Tensor]) -> None:
        self.model, self.loss_of, self.micro_batches, self.done = model, loss_of, 1, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.batches = drawn(config, rows)

    def __call__(self) -> Tensor:
        for _ in range(self.micro_batches):
            tokens = self.batches[self.done % len(self.batches)]
            self.done += 1
            loss = self.loss_of(tokens[:, :-1], tokens[:, 1:])
            (loss / self.micro_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def plain_torch(config: ModelConfig, rows: int) -> Peer:
    """The same model in plain torch: bf16, blocks compiled one by one, cuDNN attention, the loss in chunks."""
    from plain_llama import Llama, loss_of

    with torch.device("cuda"):
        model = Llama(config).to(torch.bfloat16)
    for block in model.blocks:
        block.compile()
    return Peer(model, config, rows, lambda inputs, targets: loss_of(model, inputs, targets))


def hugging_face(config: ModelConfig, rows: int, *, compiled: bool) -> Peer:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(shape, dtype=torch.bfloat16, attn_implementation="sdpa")
    if compiled:
        model.model.compile()

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = model(input_ids=inputs, labels=inputs).loss
        return found

    return Peer(model, config, rows, loss)
