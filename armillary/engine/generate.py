"""Generation with an engine sized for the given prompts: `armillary.generate`, the verb `generate` and the demo."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path

from armillary.engine.build import Phase, make_engine
from armillary.engine.engine import Completion, Engine
from armillary.engine.llm import dtype_to_load
from armillary.engine.output.output_text import Piece
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadModel
from armillary.model.device import pick_device
from armillary.model.sampling import Sampling, check_prompts, check_tokenizer, default_sampling
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model

_BROKEN = "the model's logits are not numbers; its weights are broken or its dtype too narrow"
_TOGETHER = 64


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
    loaded = load_model(
        source.folder, dtype=dtype or dtype_to_load(source, Serve(), home or Home.default(), where), device=where
    )
    tokenizer, chosen = Tokenizer.load(source.folder), sampling or default_sampling(source.folder)
    check_tokenizer(loaded, tokenizer)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    engine = _engine(loaded, tokenizer, encoded, chosen)
    completions = engine.generate([_request(i, tokens, chosen) for i, tokens in enumerate(encoded)])
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion.finish == "error":
            raise BadModel(_BROKEN)
        completion.prompt = prompt
    return completions


def _engine(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: Items[Items[int]],
    sampling: Sampling,
    phase: Phase | None = None,
) -> Engine:
    check_prompts(model, prompts, sampling)
    longest = max(map(len, prompts)) + sampling.max_tokens
    serve = Serve(
        max_running=min(len(prompts), _TOGETHER), max_model_len=longest, prefix_cache=False, memory_fraction=1.0
    )
    return make_engine(model, tokenizer, serve, warm=False, phase=phase)[0]


def _request(number: int, prompt: Items[int], sampling: Sampling) -> Request:
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed + number,
    )
    return Request(id=str(number), prompt=prompt, params=params)


def answer(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: Items[int],
    sampling: Sampling,
    phase: Phase | None = None,
) -> Iterator[Piece]:
    """Pieces as they come. The KV cache is sized for this prompt; `phase` gets the seconds of each part of the
    start."""
    engine = _engine(model, tokenizer, [prompt], sampling, phase)
    engine.scheduler.submit(_request(0, prompt, sampling), engine.loop.clock())
    while engine.busy:
        for piece in engine.step():
            if piece.finish == "error":
                raise BadModel(_BROKEN)
            yield piece
