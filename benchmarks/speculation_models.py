"""A target and a small draft, trained for `speculation.py`: 126M parameters and 2.5M on a CPU, 2.5B and 34M on an H200.

    python benchmarks/speculation_models.py FOLDER [--minutes 30]
    python benchmarks/speculation_models.py FOLDER --size gpu --minutes 2.5

Both learn the same task: a generated Python function, a name and its replacement, then the function with the name
replaced; beside it, runs of random words that are repeated. The draft is trained first; the target is the draft grown,
with wider MLPs and further layers whose projections into the residual stream start at zero, and trained on.
FOLDER/target and FOLDER/draft are Hugging Face folders. At last a draft head is trained for the target, for
`--head-steps` steps, and kept in its folder (`--head-only`: for the target that is there).
"""

import argparse
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.model.layers.attention_forms import plain
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.model.weights.mtp_weights import save_draft_head
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import LayerKind, ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.training.data.batch import Batch
from armillary.training.data.batch_sources import Validation
from armillary.training.draft_head import HeadTrainer
from armillary.training.open_data import OpenData

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
GPU_DRAFT = replace(DRAFT, hidden=1024, heads=16, head_dim=64, ffn=2816)
GPU_TARGET = replace(GPU_DRAFT, name="target", ffn=32_768, layers=(LayerKind(),) * 24)
TINY = replace(DRAFT, name="target", layers=(LayerKind(),) * 4)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained where."""

    draft: ModelConfig
    target: ModelConfig
    device: str
    draft_rows: int  # sequences per step
    target_rows: int


SIZES = {
    "cpu": Size(draft=DRAFT, target=TARGET, device="cpu", draft_rows=16, target_rows=2),
    "gpu": Size(draft=GPU_DRAFT, target=GPU_TARGET, device="cuda", draft_rows=128, target_rows=32),
    "tiny": Size(draft=DRAFT, target=TINY, device="cpu", draft_rows=16, target_rows=16),
}


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


def prepared(folder: Path, rows: int, device: str, workers: int = 12) -> Iterator[Tensor]:
    """The same on a GPU, made before by several processes, since one makes fewer tokens than a step takes; then in
    random order, over and over."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        parts = list(pool.map(_some_batches, [(folder, seed, rows) for seed in range(4 * workers)]))
    data = torch.cat(parts).to(device)
    while True:
        for each in torch.randperm(len(data) // rows).tolist():
            yield data[each * rows : (each + 1) * rows]


def _some_batches(args: tuple[Path, int, int]) -> Tensor:
    folder, seed, rows = args
    return torch.cat(list(islice(batches(Tokenizer.load(folder), seed, rows), 10)))


def train(model: Transformer, minutes: float, lr: float, data: Iterator[Tensor]) -> None:
    """Train for so long: on a GPU with autocast to bf16."""
    device = next(model.parameters()).device.type
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
        positions = torch.arange(SEQUENCE, device=device).expand(len(tokens), SEQUENCE)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            hidden = model(tokens[:, :-1], positions, plain)
            logits = model.head(hidden)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cpu" or step % 5 == 0:  # reading it waits for the device
            mean += (loss.item() - mean) / min(step + 1, 20)


@torch.no_grad()
def grown(small: Transformer, config: ModelConfig) -> Transformer:
    """`small` with wider MLPs and further layers, which add nothing yet: gate and up rows alternate, so the old ones
    come first."""
    model = drawn(config, next(small.parameters()).device.type)
    for name, weight in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            torch.nn.init.zeros_(weight)
    old = dict(small.named_parameters())
    for name, weight in model.named_parameters():
        if name in old:
            part = old[name]
            weight[tuple(slice(size) for size in part.shape)] = part
    return model


@torch.no_grad()
def drawn(config: ModelConfig, device: str) -> Transformer:
    """Random weights in fp32, on a GPU drawn there."""
    if device == "cpu":
        return build(config, dtype=torch.float32, device=device, seed=1)
    torch.manual_seed(1)
    model = build(config, dtype=torch.float32, device=device)
    into_residual = 0.02 / (2 * config.num_layers) ** 0.5
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, into_residual if name.endswith(("out.weight", "down.weight")) else 0.02)
    return model


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Batches of the task, as a trainer reads them."""

    made: Iterator[Tensor]
    batch: int
    sequence: int = SEQUENCE
    steps_per_epoch: float = float("inf")

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        rows = next(self.made).cpu().numpy()
        positions = np.broadcast_to(np.arange(SEQUENCE), (len(rows), SEQUENCE))
        documents = np.zeros((len(rows), SEQUENCE), np.int32)
        return Batch(tokens_BT=rows[:, :-1], targets_BT=rows[:, 1:], positions_BT=positions, documents_BT=documents)


def train_head(folder: Path, data: Iterator[Tensor], rows: int, steps: int, device: str) -> None:
    """The draft head of the target in `folder`."""
    model = load_model(folder, dtype="fp32" if device == "cpu" else "bf16", device=device)
    source = Rows(made=data, batch=rows)
    opened = OpenData(
        train=source, validation=Validation(parts=(), counts=()), tokenizer_folder=folder, vocab=model.config.vocab
    )
    job = TrainJob(sequence=SEQUENCE, batch_tokens=rows * SEQUENCE, steps=steps, lr=1e-3)
    trainer = HeadTrainer(model, opened, job, micro_batch=rows, precision="fp32" if device == "cpu" else "bf16")
    begin = time.monotonic()
    for last in trainer.steps():
        if last.step % 20 == 0:
            print(f"head, step {last.step}, loss {last.loss:.3f}, agrees {last.agreed}", flush=True)
    facts = {"steps": steps, "seconds": round(time.monotonic() - begin), "agreed": last.agreed}
    print(f"a head of {trainer.num_parameters:,} parameters: {facts}")
    save_draft_head(trainer.head, model.config, folder, facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--size", choices=list(SIZES), default="cpu")
    parser.add_argument("--head-steps", type=int, default=200)
    parser.add_argument("--head-only", action="store_true")
    given = parser.parse_args()
    size = SIZES[given.size]
    if not given.head_only:
        train_both(given, size)
    tokenizer, rows = Tokenizer.load(given.folder / "tokenizer"), size.draft_rows
    train_head(given.folder / "target", batches(tokenizer, 3, rows), rows, given.head_steps, size.device)


def train_both(given: argparse.Namespace, size: Size) -> None:
    rng = random.Random(0)
    texts = ["".join(question(rng)) for _ in range(2000)] + [repeated(rng) for _ in range(500)]
    tokenizer = train_tokenizer(texts, VOCAB)
    tokenizer.save(given.folder / "tokenizer")

    def save(model: Transformer) -> None:
        target = given.folder / model.config.name
        stored = model if size.device == "cpu" else model.to(torch.bfloat16)
        save_model(stored, target, template=given.folder / "tokenizer", overwrite=True)

    def data(seed: int, rows: int) -> Iterator[Tensor]:
        if size.device == "cpu":
            return batches(tokenizer, seed, rows)
        return prepared(given.folder / "tokenizer", rows, size.device)

    for config in (size.draft, size.target):
        print(f"the {config.name} has {parameters(config).total:,} parameters")
    draft = drawn(size.draft, size.device)
    train(draft, 0.75 * given.minutes, 3e-3 if size.draft.hidden < 512 else 1e-3, data(1, size.draft_rows))
    target = grown(draft, size.target)
    save(draft)
    train(target, 0.25 * given.minutes, 2e-4, data(2, size.target_rows))
    save(target)


if __name__ == "__main__":
    main()
