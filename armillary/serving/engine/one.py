"""One prompt through an engine of its own, piece by piece: what `armillary generate` and the demo show."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from armillary.errors import BadModel
from armillary.model.generate import Sampling, check_prompts
from armillary.model.tokenizer import Tokenizer
from armillary.model.transformer import Transformer
from armillary.serving.engine.answers import Piece
from armillary.serving.engine.make import make_engine
from armillary.serving.engine.params import SamplingParams
from armillary.serving.engine.request import Request
from armillary.spec.job import Serve


def answer(model: Transformer, tokenizer: Tokenizer | None, prompt: Items[int], sampling: Sampling) -> Iterator[Piece]:
    """Pieces as they come. The cache has room for this one alone."""
    check_prompts(model, [prompt], sampling)
    longest = len(prompt) + sampling.max_tokens
    serve = Serve(max_running=1, max_model_len=longest, prefix_cache=False, graphs=False)
    engine, _ = make_engine(model, tokenizer, serve)
    params = SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature, top_k=sampling.top_k,
                            top_p=sampling.top_p, seed=sampling.seed)  # fmt: skip
    engine.scheduler.submit(Request(id="one", prompt=prompt, params=params), engine.loop.clock())
    while engine.busy:
        for piece in engine.step():
            if piece.finish == "error":
                raise BadModel("the model's logits are not numbers; its weights are broken or its dtype too narrow")
            yield piece
