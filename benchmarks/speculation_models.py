"""A target of 126M parameters and a draft of 2.5M, trained on a CPU for `speculation_cpu.py`.

    python benchmarks/speculation_models.py FOLDER [--minutes 30]

Both learn the same task: a generated Python function, a name and its replacement, then the function with the name
replaced; beside it, runs of random words that are repeated. The draft is trained first; the target is the draft grown,
with wider MLPs and further layers whose projections into the residual stream start at zero, and trained on.
FOLDER/target and FOLDER/draft are Hugging Face folders.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.model.layers.attention_forms import plain
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import save_model
from armillary.spec.model import LayerKind, ModelConfig

_TEXT = """load save read write parse build merge split count total first last index value name path file line token
batch cache block table row page group layer head model data item list field key user order price stock event queue task
job step state score weight limit range point shape color size width height input output buffer frame"""
WORDS = tuple(_TEXT.split())
VOCAB, SEQUENCE = 512, 160
DRAFT = ModelConfig(
    name="draft",
    hidden=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    ffn=768,
    vocab=VOCAB,
    context=1024,
    layers=(LayerKind(),) * 3,
    tied=True,
)
TARGET = replace(DRAFT, name="target", ffn=16_384, layers=(LayerKind(),) * 10)


def function(rng: random.Random) -> tuple[str, list[str]]:
    """(text of a function, its names)"""
    name, a, b, c = rng.sample(WORDS, 4)
    lines = [
        f"    {c} = {a} + {b}",
        f"    {c} = []",
        f"    for {a} in {b}:\n        {c}.append({a})",
        f"    if {a} is None:\n        return {b}",
        f"    if not {b}:\n        raise ValueError({a})",
        f"    {c} = {name}({b}, {a})",
        f"    while {a} < len({b}):\n        {a} += 1",
        f"    print({a}, {c})",
    ]
    body = rng.sample(lines, rng.randint(2, 4))
    return "\n".join([f"def {name}({a}, {b}):", *body, f"    return {c}"]), [name, a, b, c]


def question(rng: random.Random) -> tuple[str, str]:
    """(prompt, completion)"""
    text, names = function(rng)
    old, new = rng.choice(names), rng.choice([word for word in WORDS if word not in names])
    renamed = _replaced(text, old, new)
    return f"# rename {old} to {new}\n{text}\n# renamed\n", renamed + "\n"


def _replaced(text: str, old: str, new: str) -> str:
    """Whole words only."""
    out, word = [], ""
    for letter in text + "\0":
        if letter.isalpha() or letter == "_":
            word += letter
        else:
            out += [new if word == old else word, letter]
            word = ""
    return "".join(out)[:-1]


def repeated(rng: random.Random) -> str:
    """Random words, twice."""
    words = " ".join(rng.choices(WORDS, k=rng.randint(4, 30)))
    return f"{words}\n{words}\n"


def batches(tokenizer: Tokenizer, seed: int, rows: int) -> Iterator[Tensor]:
    """[B, T + 1] of documents, one after the other."""
    rng = random.Random(seed)
    stream: list[int] = []
    size = rows * (SEQUENCE + 1)
    while True:
        while len(stream) < size:
            text = "".join(question(rng)) if rng.random() < 0.7 else repeated(rng)
            stream += [*tokenizer.encode(text), *tokenizer.eos_ids[:1]]
        yield torch.tensor(stream[:size]).view(rows, SEQUENCE + 1)
        stream = stream[size:]


def train(model: Transformer, minutes: float, lr: float, data: Iterator[Tensor]) -> None:
    """Train for so long."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    begin, mean = time.monotonic(), 10.0
    for step, tokens in enumerate(data):
        spent = (time.monotonic() - begin) / 60 / minutes
        if step % 20 == 0:
            print(f"{model.config.num_layers} layers, step {step}, loss {mean:.3f}, {spent:.0%}", flush=True)
        if spent >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 30) * max(0.05, min(1.0, 2 * (1 - spent)))
        positions = torch.arange(SEQUENCE).expand(len(tokens), SEQUENCE)
        hidden = model(tokens[:, :-1], positions, plain)
        loss = F.cross_entropy(model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean += (loss.item() - mean) / min(step + 1, 20)


@torch.no_grad()
def grown(small: Transformer, config: ModelConfig) -> Transformer:
    """`small` with wider MLPs and further layers, which add nothing yet: gate and up rows alternate, so the old ones
    come first."""
    model = build(config, dtype=torch.float32, device="cpu", seed=1)
    for name, weight in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            torch.nn.init.zeros_(weight)
    old = dict(small.named_parameters())
    for name, weight in model.named_parameters():
        if name in old:
            part = old[name]
            weight[tuple(slice(size) for size in part.shape)] = part
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    given = parser.parse_args()
    rng = random.Random(0)
    texts = ["".join(question(rng)) for _ in range(2000)] + [repeated(rng) for _ in range(500)]
    tokenizer = train_tokenizer(texts, VOCAB)
    tokenizer.save(given.folder / "tokenizer")

    def save(model: Transformer) -> None:
        target = given.folder / model.config.name
        save_model(model, target, template=given.folder / "tokenizer", overwrite=True)

    draft = build(DRAFT, dtype=torch.float32, device="cpu", seed=1)
    target = grown(draft, TARGET)
    for model in (draft, target):
        print(f"the {model.config.name} has {sum(p.numel() for p in model.parameters()):,} parameters")
    train(draft, 0.75 * given.minutes, 3e-3, batches(tokenizer, 1, 16))
    save(draft)
    target = grown(draft, TARGET)
    train(target, 0.25 * given.minutes, 2e-4, batches(tokenizer, 2, 2))
    save(target)


if __name__ == "__main__":
    main()
