"""How far the engine's logits are from fp32, beside transformers' in the same format, on transformers' greedy answers.

    python benchmarks/engine_accuracy.py [--prompts 64] [--tokens 128] [--device cuda] [--layers 28] [--json FILE]

A Qwen3-0.6B shape with random weights. The same texts (prompt and answer) go through transformers in fp32 and in bf16
and through the engine in bf16, whole and a token at a time (as decoding computes them); errors are the largest and the
mean over all logits. Where the engine's likeliest token is not fp32's, the gap between the two in fp32 must be within
twice that place's largest error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from armillary.model.weights import load_model
from armillary.serving.engine.make import make_engine
from armillary.serving.engine.params import SamplingParams
from armillary.serving.engine.request import Request
from armillary.spec.job import Serve

SHAPE = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
         "rms_norm_eps": 1e-6}  # fmt: skip
SMALL = SHAPE | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


def transformers_model(args: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**(SMALL if args.tiny else SHAPE), num_hidden_layers=args.layers)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(args.device)


def our_logits(engine: Any, texts: Tensor) -> list[Tensor]:
    """Logits of every token of every text, through steps of the engine: the prompts' are caught where log-probabilities
    are made of them."""
    executor, caught = engine.loop.executor, []
    plain_logits = executor.forward.logits

    def catching(hidden: Tensor) -> Tensor:
        logits: Tensor = plain_logits(hidden)
        caught.append(logits.float().cpu())
        return logits

    found = []
    executor.forward.logits = catching
    for i, text in enumerate(texts.tolist()):
        caught.clear()
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        (answer,) = engine.generate([Request(id=str(i), prompt=text, params=params)])
        assert not answer.error, answer.error
        found.append(torch.cat(caught[:-1]))  # the last are those of the answer's one token
    executor.forward.logits = plain_logits
    return found


@torch.inference_mode()
def compare(args: Any) -> dict[str, Any]:
    theirs = transformers_model(args)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(Path(folder), dtype="bf16", device=torch.device(args.device))
    prompts = torch.randint(0, theirs.config.vocab_size, (args.prompts, 32), device=args.device)
    texts = theirs.generate(prompts, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    exact = [theirs(row[None]).logits[0, :-1].cpu() for row in texts]
    half = [theirs.bfloat16()(row[None]).logits[0, :-1].float().cpu() for row in texts]
    return {name: _compared(_through_engine(ours, texts, step), exact, half)
            for name, step in (("whole", texts.shape[1] + 8), ("a token at a time", 1))}  # fmt: skip


def _through_engine(model: Any, texts: Tensor, step_tokens: int) -> list[Tensor]:
    serve = Serve(max_running=1, max_model_len=texts.shape[1] + 8, max_tokens_per_step=step_tokens, graphs=False,
                  prefix_cache=False)  # fmt: skip
    engine, _ = make_engine(model, None, serve, seed=0)
    return our_logits(engine, texts)


def _compared(mine: list[Tensor], exact: list[Tensor], half: list[Tensor]) -> dict[str, Any]:
    our_errors = [(a - b).abs().amax(-1) for a, b in zip(mine, exact, strict=True)]
    their_errors = [(a - b).abs().amax(-1) for a, b in zip(half, exact, strict=True)]
    bad = differ = 0
    for a, b, error in zip(mine, exact, our_errors, strict=True):
        best = a.argmax(-1)
        gap = b.amax(-1) - b.gather(1, best[:, None])[:, 0]
        differ += int((gap > 0).sum())
        bad += int((gap > 2 * error).sum())
    ours_max, theirs_max = (float(torch.cat(errors).max()) for errors in (our_errors, their_errors))
    ours_mean, theirs_mean = (float(torch.cat(errors).mean()) for errors in (our_errors, their_errors))
    return {"largest": {"engine": ours_max, "transformers": theirs_max, "ratio": ours_max / theirs_max},
            "mean of largest a token": {"engine": ours_mean, "transformers": theirs_mean,
                                        "ratio": ours_mean / theirs_mean},
            "tokens": sum(map(len, exact)), "other likeliest": differ, "beyond the bar": bad,
            "bars": {"ratio": 2.0, "beyond the bar": 0}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = compare(args)
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
