"""Two models for the exercise on serving: a small one that is trained here on generated orders, and the same grown to
one that reads so many weights per token that decoding is memory-bound. The small one drafts for the large one.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where benchmarks/ is

import armillary
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import LayerKind
from armillary.spec.recipe import recipe_from_dict, to_toml
from armillary.store.home import Home
from benchmarks.speculation_models import grown

NAMES = (
    "smith",
    "jones",
    "miller",
    "davis",
    "wilson",
    "moore",
    "taylor",
    "thomas",
    "white",
    "harris",
    "martin",
    "clark",
    "lewis",
    "young",
    "king",
)
ITEMS = (
    "paper",
    "pencils",
    "lamps",
    "chairs",
    "desks",
    "cables",
    "screens",
    "phones",
    "boxes",
    "labels",
    "pens",
    "folders",
    "stamps",
    "clips",
)
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")
SHAPE = {"num_layers": 1, "hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 768, "context": 1024}
NOISE = 0.05
"""of the grown model's weights, over their own standard deviation, so that the draft is not always right"""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Folders of both, and facts about them."""

    draft: Path
    target: Path
    draft_parameters: int
    target_parameters: int
    int8_ratio: float
    """bytes of the large one in fp32 over those with its layers in int8, of which a token reads all"""
    loss: float


def order(draw: random.Random) -> str:
    """One record; most of it is the same every time, as in logs, JSON and code."""
    number, price = draw.randint(1, 9), draw.randint(2, 60)
    return (
        f"order {draw.randint(1000, 9999)}\n  customer: {draw.choice(NAMES)}\n"
        f"  item: {number} x {draw.choice(ITEMS)}, {price}.50 each\n  state: {draw.choice(('paid', 'open'))}, "
        f"shipped on {draw.choice(DAYS)}\n\n"
    )


def make_models(folder: Path, *, quick: bool) -> Models:
    """Train the small one (ten seconds of an idle core), grow the large one."""
    draw, text = random.Random(0), folder / "orders"
    text.mkdir()
    for i in range(50 if quick else 400):
        (text / f"{i}.txt").write_text("".join(order(draw) for _ in range(20)))
    steps = 5 if quick else 60
    recipe = recipe_from_dict(
        {
            "model": {"name": "armillary-5m", "vocab": 512} | SHAPE,
            "hardware": {"on": "here"},
            "data": {"source": str(text), "vocab": 512},
            "layout": {"precision": "fp32", "micro_batch": 8},
            "train": {"sequence": 128, "batch_tokens": 1024, "steps": steps, "lr": 2e-3}
            | {"eval_every": 0, "profile_every": 0, "save_every": 0, "compile": False},
        }
    )
    file = folder / "orders.toml"
    file.write_text(to_toml(recipe))
    done = armillary.train(file, home=Home.at(folder / "home"), watch=lambda report: None)
    assert done.export is not None and done.loss is not None
    draft = load_model(done.export, dtype="fp32", device="cpu")
    target = grown_model(draft, ffn=768 if quick else 4096, layers=3 if quick else 6)
    save_model(target, folder / "target", template=done.export)
    size = parameters(target.config).total
    outside = target.config.vocab * target.config.hidden  # the output projection stays as it is
    return Models(
        draft=done.export,
        target=folder / "target",
        draft_parameters=parameters(draft.config).total,
        target_parameters=size,
        int8_ratio=4 * size / (size - outside + 4 * outside),
        loss=done.loss,
    )


@torch.no_grad()
def grown_model(draft: Transformer, *, ffn: int, layers: int) -> Transformer:
    """The small model's function, computed with many more weights, and some noise."""
    config = replace(draft.config, name="target", ffn=ffn, layers=(LayerKind(),) * layers)
    target = grown(draft, config)
    torch.manual_seed(2)
    for weight in target.parameters():
        if weight.ndim == 2:
            weight += NOISE * weight.std() * torch.randn_like(weight)
    return target
