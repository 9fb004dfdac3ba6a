"""A model of 100 M parameters with 2-simplicial attention in every second layer: trained, exported, served, and its
answers held against its full forward pass, token by token.

    python -m benchmarks.simplicial_training [--shape 100m|hopper|tiny] [--steps 200] [--device cuda] [--json FILE]

'hopper' has 128 query heads of 128 dims per KV head, which is what the kernels for Hopper take; 'tiny' is for a CPU.
Trained in bf16 on a GPU, on this package's own source. Served twice: in fp32, where every greedy token must be the
likeliest of the full forward pass (plain torch, no cache), and in bf16, of which the share that agrees with that pass
is told, and the largest gap in fp32 logits where it does not. About 3 minutes on an H200, most of it compilation. The
last line on stdout is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import armillary
from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.layers.attention_forms import plain
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model
from armillary.spec.arithmetic.params import parameters
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home

WIDE = {"hidden": 768, "ffn": 2048, "vocab": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "100m": {"hidden": 768, "ffn": 2048, "num_layers": 16, "heads": 12, "kv_heads": 4, "head_dim": 64, "vocab": 8192},
    "hopper": {
        "hidden": 768,
        "ffn": 2048,
        "num_layers": 3,
        "heads": 128,
        "kv_heads": 1,
        "head_dim": 128,
        "vocab": 8192,
    },
    "tiny": {"hidden": 64, "ffn": 128, "num_layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512},
}
SEQUENCE, WINDOWS, ROWS = {"tiny": 64}, {"tiny": (4, 16)}, {"tiny": 4}
"""of shapes that are not of the usual 1,024 tokens, windows of 32 and 512, and 16 rows a step"""
KV_BYTES = 256 << 20
PROMPTS = ("def main(", "class Engine:\n", "import torch\n\n", "    return ", '"""', "for ")


def recipe(shape: str, steps: int, on_gpu: bool) -> Recipe:
    sequence, (one, two), rows = SEQUENCE.get(shape, 1024), WINDOWS.get(shape, (32, 512)), ROWS.get(shape, 16)
    pairs = {"attention_pattern": ["full", "2-simplicial"], "simplicial": {"window_1": one, "window_2": two}}
    return recipe_from_dict(
        {
            "model": {"name": "armillary-25m", "context": 2 * sequence} | SHAPES[shape] | pairs,
            "hardware": {"on": "here"},
            "data": {"source": str(Path(armillary.__file__).parent / "spec")},
            "layout": {"precision": "bf16" if on_gpu else "fp32", "micro_batch": rows // 2},
            "train": {"sequence": sequence, "batch_tokens": rows * sequence, "steps": steps, "lr": 6e-4}
            | {"eval_every": 0, "profile_every": 0, "compile": False},
        }
    )


def trained(shape: str, steps: int, device: str, home: Home) -> tuple[Path, dict[str, Any]]:
    losses: list[float] = []
    begin = time.perf_counter()
    done = armillary.train(
        recipe(shape, steps, device.startswith("cuda")),
        home=home,
        device=device,
        watch=lambda report: losses.append(report.gauges["loss"]),
    )
    assert done.export is not None, "the run was stopped"
    config = armillary.resolve_model(str(done.export), home, need_weights=True).config
    figures = {
        "parameters_m": round(parameters(config).total / 1e6, 1),
        "steps": done.steps,
        "first_loss": round(losses[0], 3),
        "last_loss": round(done.loss, 3),
        "train_s": round(time.perf_counter() - begin, 1),
    }
    return done.export, figures


def served(folder: Path, dtype: str, device: str, home: Home, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, answers) as token ids, decoded together over the paged cache."""
    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    serve = Serve(max_running=len(prompts), max_model_len=max(map(len, prompts)) + tokens, kv_bytes=KV_BYTES)
    llm = LLM(folder, serve, home=home, dtype=dtype, device=device)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    completions = llm.generate(list(PROMPTS), params)
    failed = [each.error for each in completions if each.error]
    assert not failed, failed
    return prompts, [each.tokens for each in completions]


@torch.inference_mode()
def full_logits(model: Transformer, text: list[int]) -> Tensor:
    """[T, V] of one pass over the whole text, without a cache."""
    tokens_1T = torch.tensor([text], device=next(model.parameters()).device)
    positions_1T = torch.arange(len(text), device=tokens_1T.device)[None]
    return model.head(model(tokens_1T, positions_1T, plain))[0].float()


def compared(model: Transformer, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """How many tokens are the likeliest of the full pass over all that stands before them."""
    equal, total, gap = 0, 0, 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = full_logits(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
        below = logits.max(1).values - chosen
        equal, total, gap = equal + int((below == 0).sum()), total + len(answer), max(gap, float(below.max()))
    distinct = len({token for answer in answers for token in answer})
    return {"tokens": total, "distinct": distinct, "equal": equal, "largest_gap": round(gap, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="100m")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures: dict[str, Any] = {"shape": given.shape, "device": given.device}
    try:
        with tempfile.TemporaryDirectory() as name:
            home = Home.at(Path(name))
            folder, more = trained(given.shape, given.steps, given.device, home)
            figures |= more
            print(json.dumps(figures), flush=True)
            model = load_model(folder, dtype="fp32", device=given.device)
            for dtype in ("fp32", "bf16") if given.device.startswith("cuda") else ("fp32",):
                begin = time.perf_counter()
                prompts, answers = served(folder, dtype, given.device, home, given.tokens)
                seconds = round(time.perf_counter() - begin, 1)
                figures[f"served_{dtype}"] = compared(model, prompts, answers) | {"seconds": seconds}
                print(json.dumps(figures), flush=True)
        exact = figures["served_fp32"]
        figures["token_equal"] = exact["equal"] == exact["tokens"]
    finally:  # what is known so far is the last line in any case
        if given.json is not None:
            given.json.write_text(json.dumps(figures, indent=1))
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
