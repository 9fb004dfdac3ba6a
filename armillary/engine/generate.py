"""Generation with an engine sized for the given prompts: `armillary.generate`, the verb `generate` and the demo."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

from armillary.engine.build import Phase, make_engine
from armillary.engine.engine import Completion, Engine
from armillary.engine.llm import dtype_to_load
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import Sampling, default_sampling
from armillary.errors import BadInput, BadModel
from armillary.model.device import pick_device
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model

_BROKEN = "the model's logits are not numbers; its weights are broken or its dtype too narrow"
_MAX_RUNNING = 64


def generate(
    model: Path | str,
    prompts: Items[str],
    sampling: Sampling | None = None,
    *,
    home: Home | None = None,
    dtype: str | None = None,
    device: str | None = None,
) -> list[Completion]:
    """Complete `prompts` with a Hugging Face folder, a Hub id, a run or a release; prompt i samples with seed + i."""
    source = resolve_model(str(model), home or Home.default(), need_weights=True)
    assert source.folder is not None
    where = pick_device(device)
    dtype = dtype or dtype_to_load(source, Serve(), home or Home.default(), where)
    loaded = load_model(source.folder, dtype=dtype, device=where, packed=True)
    tokenizer, chosen = Tokenizer.load(source.folder), sampling or default_sampling(source.folder)
    check_tokenizer(loaded, tokenizer)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    engine = _engine(loaded, tokenizer, encoded, chosen)
    completions = engine.generate([_request(i, tokens, chosen) for i, tokens in enumerate(encoded)])
    for completion in completions:
        if completion.finish == "error":
            raise BadModel(_BROKEN)
        completion.prompt = prompts[int(completion.request.id)]
    return completions


def answer(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: Items[int],
    sampling: Sampling,
    phase: Phase | None = None,
) -> Iterator[OutputDelta]:
    """Deltas as they come. The KV cache is sized for this prompt; `phase` gets the seconds of each part of the
    start."""
    engine = _engine(model, tokenizer, [prompt], sampling, phase)
    engine.scheduler.submit(_request(0, prompt, sampling), engine.loop.clock())
    while engine.busy:
        for delta in engine.step():
            if delta.finish == "error":
                raise BadModel(_BROKEN)
            yield delta


def _engine(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: Items[Items[int]],
    sampling: Sampling,
    phase: Phase | None = None,
) -> Engine:
    check_prompts(model, prompts, sampling)
    serve = Serve(
        max_running=min(len(prompts), _MAX_RUNNING),
        max_model_len=max(map(len, prompts)) + sampling.max_tokens,
        prefix_cache=False,
        memory_fraction=1.0,
    )
    return make_engine(model, tokenizer, serve, warm=False, phase=phase)[0]


def _request(number: int, prompt: Items[int], sampling: Sampling) -> Request:
    return Request(id=str(number), prompt=prompt, params=replace(sampling, seed=sampling.seed + number))


def check_tokenizer(model: Transformer, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with ids that the model does not have."""
    if tokenizer.vocab_size > model.config.vocab:
        rows = f"the model has {model.config.vocab} rows and its tokenizer ids up to {tokenizer.vocab_size - 1}"
        raise BadModel(f"{model.config.name}: {rows}; use the tokenizer the model was trained with")


def check_prompts(model: Transformer, prompts: Items[Items[int]], sampling: Sampling) -> None:
    """Refuse prompts that the model cannot continue."""
    vocab, context = model.config.vocab, model.config.context
    if not prompts:
        raise BadInput("there is no prompt; give at least one")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise BadInput(f"prompt {i + 1} is empty; give at least one token")
        if max(prompt) >= vocab or min(prompt) < 0:
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise BadInput(
                f"prompt {i + 1} has token {wrong} outside the model's vocabulary of {vocab}; use its tokenizer"
            )
        left = context - len(prompt)
        if left < sampling.max_tokens:
            wanted = f"{len(prompt)} + {sampling.max_tokens} tokens exceed the context of {context}"
            fix = f"ask for at most {left}" if left > 0 else "shorten the prompt"
            raise BadInput(f"prompt {i + 1}: {wanted}; {fix}")
