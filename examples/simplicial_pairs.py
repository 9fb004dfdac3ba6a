"""Attention to pairs of tokens on a question about triples: a model with and without 2-simplicial attention, by step.

    python examples/simplicial_pairs.py             three minutes; writes simplicial_pairs/table.md and two plots
    python examples/simplicial_pairs.py --quick     a few steps of two models

At every place of a sequence of numbers: are there two earlier ones, or one twice, that make a multiple of 16 together
with this one? docs/exercises/simplicial_pairs.md says what to predict first.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from exercise import finish, read_options, table
from torch import Tensor

import armillary
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer, build
from armillary.report.charts import lines, share_text
from armillary.spec.arithmetic.attention_ops import AttentionShape, attention, simplicial_attention
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import ModelConfig
from armillary.spec.tables.model import apply_model_overrides
from armillary.units import count_text, seconds_text

MODULUS, LENGTH, ROWS, HIDDEN, HEADS = 16, 8, 64, 64, 4
STEPS, LR, WARM_UP, EVERY, TEST_ROWS = 500, 3e-3, 50, 25, 512
MODELS: dict[str, tuple[str, int]] = {
    "attention, 1 layer": ("full", 1),
    "attention, 2 layers": ("full", 2),
    "2-simplicial, 1 layer": ("2-simplicial", 1),
}
"""name -> (kind of attention, layers); all else is equal"""


@dataclass(kw_only=True)
class Trained:
    """Loss of every step, and share of right answers on sequences that were not trained on, by step."""

    config: ModelConfig
    losses: list[float] = field(default_factory=list)
    right: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0


def shape(kind: str, layers: int) -> ModelConfig:
    """Without rotation: the question does not depend on places."""
    changes = {
        "vocab": MODULUS,
        "context": LENGTH,
        "num_layers": layers,
        "hidden": HIDDEN,
        "heads": HEADS,
        "kv_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "ffn": 4 * HIDDEN,
        "nope_every": 1,
        "attention_pattern": [kind],
    }
    pairs = {"simplicial": {"window_1": LENGTH, "window_2": LENGTH}} if kind == "2-simplicial" else {}
    return apply_model_overrides(armillary.models()["armillary-2m"].config, changes | pairs)


def drawn(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(numbers [rows, LENGTH], whether two earlier ones, or one twice, make a multiple of MODULUS with each)."""
    x_BT = torch.randint(MODULUS, (rows, LENGTH), generator=generator)
    triples = (x_BT[:, :, None, None] + x_BT[:, None, :, None] + x_BT[:, None, None, :]) % MODULUS == 0
    earlier = torch.ones(LENGTH, LENGTH).tril(-1).bool()
    return x_BT, (triples & earlier[:, :, None] & earlier[:, None, :]).flatten(2).any(-1)


def answers(model: Transformer, x_BT: Tensor) -> Tensor:
    """Logits of no and yes: the first two of the head's."""
    positions_BT = torch.arange(LENGTH).expand(len(x_BT), -1)
    return model.head(model(x_BT, positions_BT, plain))[..., :2]


def train(kind: str, layers: int, steps: int) -> Trained:
    config = shape(kind, layers)
    model = build(config, dtype=torch.float32, device="cpu", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    data, test = torch.Generator().manual_seed(1), drawn(TEST_ROWS, torch.Generator().manual_seed(2))
    result, begin = Trained(config=config), time.thread_time()
    for step in range(steps):
        x_BT, wanted_BT = drawn(ROWS, data)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / WARM_UP) * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        loss = F.cross_entropy(answers(model, x_BT).flatten(0, 1), wanted_BT.long().flatten())
        loss.backward()
        optimizer.step()
        result.losses.append(float(loss.detach()))
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            with torch.no_grad():
                right = (answers(model, test[0]).argmax(-1) == test[1]).float().mean()
            result.right.append((float(step + 1), float(right)))
    result.seconds = time.thread_time() - begin
    return result


def attention_flops(config: ModelConfig, length: int) -> float:
    """Of one head and layer on one sequence, forward, scores and weighted values."""
    one = AttentionShape(heads=1, kv_heads=1, qk_dim=config.head_dim, v_dim=config.head_dim)
    if config.simplicial is None:
        return attention("attention", one, [(length, length)], dtype="fp32").flops
    windows = {"window_1": length, "window_2": length}
    return simplicial_attention("attention", one, [(length, length)], dtype="fp32", **windows).flops


def main() -> None:
    options = read_options("simplicial_pairs", __doc__)
    steps = 10 if options.quick else STEPS
    torch.set_num_threads(1)  # more would wait for each other longer than such small GEMMs take
    names = [name for name in MODELS if not options.quick or "1 layer" in name]
    made: dict[str, Trained] = {}
    for name in names:
        made[name] = train(*MODELS[name], steps)
        print(f"{name}: {made[name].right[-1][1]:.1%} right after {steps} steps", flush=True)
    wanted_BT = drawn(TEST_ROWS, torch.Generator().manual_seed(2))[1]
    guess = max(float(wanted_BT.float().mean()), 1 - float(wanted_BT.float().mean()))
    rows = [
        (
            name,
            count_text(parameters(each.config).total),
            f"{statistics.mean(each.losses[-EVERY:]):.3f}",
            f"{each.right[-1][1]:.1%}",
            f"{attention_flops(each.config, LENGTH) / attention_flops(shape('full', 1), LENGTH):.1f} ×",
            f"{attention_flops(each.config, 1024) / attention_flops(shape('full', 1), 1024):,.0f} ×",
            seconds_text(each.seconds / steps),
        )
        for name, each in made.items()
    ]
    heads = ("model", "weights", "loss", "right", f"FLOPs of a head at {LENGTH} tokens", "at 1,024 tokens", "step")
    text = f"{steps} steps of {ROWS} sequences; always the likelier answer: {guess:.1%} right\n\n" + table(heads, rows)
    right = lines(
        [(name, each.right) for name, each in made.items()],
        label="Share of right answers by step",
        x_name="step",
        y_text=share_text,
    )
    over = 10
    losses = lines(
        [
            (name, [(float(i + over), statistics.mean(each.losses[i : i + over])) for i in range(0, steps, over)])
            for name, each in made.items()
        ],
        label="Loss by step, means of ten",
        x_name="step",
    )
    finish(options, text, right, "share of right answers by step", (losses, "loss by step, means of ten"))


if __name__ == "__main__":
    main()
