"""How far the engine's logits are from fp32, beside transformers' in the same format, on transformers' greedy answers.

    python -m benchmarks.engine_accuracy [--prompts 64] [--tokens 128] [--device cuda] [--layers 28] [--json FILE]

A Qwen3-0.6B shape with random weights. The same texts (prompt and answer) go through transformers in fp32 and in bf16
and through the engine in bf16, as prompts and decoded together, a token a step (in CUDA graphs on a GPU). Errors
are the largest and the mean over tokens of the largest over the vocabulary. Where the engine's likeliest token is not
fp32's, the gap between the two in fp32 must be within twice that place's largest error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from armillary.engine.build import make_engine
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
SMALL = SHAPE | {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def transformers_model(args: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**(SMALL if args.tiny else SHAPE), num_hidden_layers=args.layers)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(args.device)


def of_prompts(engine: Any, texts: Tensor) -> list[Tensor]:
    """Logits of every token but the last of every text, computed as prompts: caught where log-probabilities are made
    of them."""
    executor, caught = engine.loop.executor, list[Tensor]()
    plain_logits = executor.forward.logits

    def catching(hidden: Tensor) -> Tensor:
        caught.append(plain_logits(hidden))
        return caught[-1]

    found = []
    executor.forward.logits = catching
    for i, text in enumerate(texts.tolist()):
        caught.clear()
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        (answer,) = engine.generate([Request(id=str(i), prompt=text, params=params)])
        assert not answer.error, answer.error
        found.append(torch.cat(caught[:-1]))  # the last are those of the answer's one token
    return found


def of_answers(engine: Any, texts: Tensor, num_prompt: int) -> list[Tensor]:
    """Logits of every token from the prompt's last on, decoded together: whatever is drawn, the next token is the
    text's."""
    executor, (count, length) = engine.loop.executor, texts.shape
    sampler, rows = executor.sampler, {}
    forced = torch.zeros(len(executor.rows.tokens_RT), length + 1, dtype=torch.int64, device=texts.device)
    vocab = executor.vocab
    caught = torch.zeros(len(forced), length + 1, vocab, dtype=torch.bfloat16, device=texts.device)

    def quick(logits_BV: Tensor, inputs: Any) -> Tensor:
        at = (inputs.long("rows_B"), inputs.long("lengths_B"))
        caught.index_put_(at, logits_BV.to(caught.dtype))
        return sampler.store(forced[at], inputs)  # type: ignore[no-any-return]

    def admitted(seq: Any) -> Any:
        rows[int(seq.id)] = seq.row
        forced[seq.row, :length] = texts[int(seq.id)]
        return plain_admitted(seq)

    plain_admitted, executor.encoder._admitted, sampler.quick = executor.encoder._admitted, admitted, quick
    executor.warm()
    params = SamplingParams(max_tokens=length - num_prompt, temperature=0.0, ignore_eos=True)
    engine.generate(
        [Request(id=str(i), prompt=text[:num_prompt], params=params) for i, text in enumerate(texts.tolist())]
    )
    return [caught[rows[i], num_prompt:length] for i in range(count)]


@torch.inference_mode()
def compare(args: Any) -> dict[str, Any]:
    theirs = transformers_model(args)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(Path(folder), dtype="bf16", device=torch.device(args.device))
    prompts = torch.randint(0, theirs.config.vocab_size, (args.prompts, 32), device=args.device)
    texts = theirs.generate(prompts, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    exact = [theirs(row[None]).logits[0, :-1] for row in texts]
    half = [theirs.bfloat16()(row[None]).logits[0, :-1] for row in texts]
    found = {"as prompts": _compared(of_prompts(_engine(ours, texts, running=1, warm=False), texts), exact, half)}
    engine = _engine(ours, texts, running=args.prompts, warm=False)
    exact, half = ([x[31:] for x in given] for given in (exact, half))
    return found | {"decoded": _compared(of_answers(engine, texts, 32), exact, half)}


def _engine(model: Any, texts: Tensor, *, running: int, warm: bool) -> Any:
    serve = Serve(max_running=running, max_model_len=texts.shape[1] + 8, kv_bytes=4_000_000_000, prefix_cache=False)
    return make_engine(model, None, serve, seed=0, warm=warm)[0]


def _compared(mine: list[Tensor], exact: list[Tensor], half: list[Tensor]) -> dict[str, Any]:
    our_errors = [(a.float() - b).abs().amax(-1) for a, b in zip(mine, exact, strict=True)]
    their_errors = [(a.float() - b).abs().amax(-1) for a, b in zip(half, exact, strict=True)]
    bad = differ = 0
    for a, b, error in zip(mine, exact, our_errors, strict=True):
        best = a.argmax(-1)
        gap = b.amax(-1) - b.gather(1, best[:, None])[:, 0]
        differ += int((gap > 0).sum())
        bad += int((gap > 2 * error).sum())
    ours_max, theirs_max = (float(torch.cat(errors).max()) for errors in (our_errors, their_errors))
    ours_mean, theirs_mean = (float(torch.cat(errors).mean()) for errors in (our_errors, their_errors))
    return {
        "largest": {"engine": ours_max, "transformers": theirs_max, "ratio": ours_max / theirs_max},
        "mean of largest a token": {"engine": ours_mean, "transformers": theirs_mean, "ratio": ours_mean / theirs_mean},
        "tokens": sum(map(len, exact)),
        "other likeliest": differ,
        "beyond the bar": bad,
        "bars": {"ratio": 2.0, "beyond the bar": 0},
    }


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
