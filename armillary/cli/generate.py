"""`armillary generate`: text from a model, streamed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from armillary.cli import completion
from armillary.cli.open_model import open_model
from armillary.cli.output import Output
from armillary.cli.verb_decorator import model_code_option, verb
from armillary.errors import BadInput
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.engine.engine import Completion
    from armillary.engine.request.sampling_params import Sampling
    from armillary.model.text.tokenizer import Tokenizer
    from armillary.model.transformer import Transformer


@verb
@click.argument("model", shell_complete=completion.models)
@click.argument("prompt", default="-")
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template.")
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=float, help="0 is greedy.  [default: the model's own, else 0.8]")
@click.option(
    "--top-p", type=float, help="Keep the likeliest tokens up to this probability.  [default: the model's, else 0.95]"
)
@click.option("--seed", default=0, show_default=True, help="Same seed, same text.")
@click.option("--dtype", help="fp32, bf16 or fp16.  [default: as serve.dtype=auto resolves it]")
@click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
@click.option("--random-weights", is_flag=True, help="Run a shape that has no weights.")
@model_code_option
def generate(
    out: Output,
    home: Home,
    model: str,
    prompt: str,
    chat: bool,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    dtype: str | None,
    device: str | None,
    random_weights: bool,
) -> None:
    """Continue PROMPT (- reads it from standard input) with MODEL.

    MODEL is a Hugging Face folder, a GGUF file, a Hub id or a run; a shape without a tokenizer takes token ids:
    "1 15 7".
    """
    from armillary.engine.request.sampling_params import MODEL_FIELDS, Sampling
    from armillary.model.generation_config import sampling_defaults

    asked: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    given = {name: value for name, value in asked.items() if value is not None}
    sampling = Sampling(**({"top_p": 0.95} | given))  # what is wrong with it is said before anything is loaded
    text = sys.stdin.read() if prompt == "-" else prompt
    begin = time.monotonic()
    source, loaded = open_model(
        out, home, model, random_weights=random_weights, seed=seed, dtype=dtype, device=device, packed=True
    )
    phases = {"weights": time.monotonic() - begin}
    own = sampling_defaults(source.files)
    sampling = replace(
        sampling, **{name: value for name, value in own.given.items() if name in MODEL_FIELDS and name not in given}
    )
    if source.files is None or not (source.files / "tokenizer.json").is_file():
        return generate_ids(out, loaded, source.name, text, sampling)
    from armillary.model.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(source.files)
    if chat:
        text = tokenizer.chat([{"role": "user", "content": text}])
    begin = time.monotonic()
    generated = stream_completion(
        out.stream, loaded, tokenizer, text, sampling, special=not chat, before="" if chat else text, phases=phases
    )
    seconds = time.monotonic() - begin
    out.say(f"\n\n{len(generated.tokens)} tokens · {len(generated.tokens) / seconds:.1f} tokens/s · {generated.finish}")
    if own.given:
        out.say(f"the model's sampling defaults, where no flag says otherwise: {own}")
    out.say("start: " + " · ".join(f"{name} {spent:.2f} s" for name, spent in phases.items()))
    answer = {
        "text": generated.text,
        "tokens": generated.tokens,
        "finish": generated.finish,
        "seconds": seconds,
        "start_s": phases,
    }
    out.result(answer, quiet=generated.text)


def stream_completion(
    emit: Callable[[str], None],
    model: Transformer,
    tokenizer: Tokenizer,
    text: str,
    sampling: Sampling,
    *,
    special: bool,
    before: str = "",
    phases: dict[str, float] | None = None,
) -> Completion:
    """Complete one prompt, handing text to `emit` as whole characters become known; `before` goes ahead of it, once
    there is something to follow it. Seconds to the first token go to `phases`."""
    from armillary.engine.engine import Completion
    from armillary.engine.generate import answer, check_tokenizer

    check_tokenizer(model, tokenizer)
    completion: Completion | None = None
    spent, begin = {} if phases is None else phases, time.monotonic()
    ids = tokenizer.encode(text, special=special)
    for delta in answer(model, tokenizer, ids, sampling, lambda name, seconds: spent.update({name: seconds})):
        if completion is None:
            completion = Completion(request=delta.sequence.request, prompt=text)
            emit(before)
            spent["first token"] = time.monotonic() - begin - spent.get("kernels and KV cache", 0.0)
        emit(delta.text)
        completion.add(delta)
    assert completion is not None, "an engine ends every request with a delta"
    return completion


def generate_ids(out: Output, model: Transformer, name: str, text: str, sampling: Sampling) -> None:
    """Token ids in, token ids out, for a shape that comes without a tokenizer."""
    from armillary.engine.generate import answer

    try:
        ids = [int(word) for word in text.split()]
    except ValueError:
        raise BadInput(f'{name} has no tokenizer; give the prompt as token ids, like "1 15 7"') from None
    tokens = [token for delta in answer(model, None, ids, sampling) for token in delta.tokens]
    out.say(" ".join(map(str, tokens)))
    out.result({"tokens": tokens}, quiet=" ".join(map(str, tokens)))
