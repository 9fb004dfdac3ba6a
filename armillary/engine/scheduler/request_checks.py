"""Checks of a request, and its sequences.

Work in proportion to the prompt (copying, checking, hashing) is done here, outside the steps.
"""

from collections.abc import Callable

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.request.constraint import Constraint
from armillary.engine.request.request import Request
from armillary.engine.request.sequence import EVERY_TOKEN, Sequence
from armillary.engine.request.token_limits import limited
from armillary.engine.scheduler.settings import Settings
from armillary.errors import BadInput, ContextLengthExceeded

MakeConstraint = Callable[[], Constraint]
LONG_ROPE = "\0long rope"  # added to the adapter's name: sequences with long-context RoPE share no blocks with others


def check(request: Request, settings: Settings, cache: KVCache, constraint: MakeConstraint | None = None) -> int:
    """Most tokens of its sequences; BadInput where the request cannot be served."""
    _check_prompt(request, settings)
    params, length = request.params, len(request.prompt)
    params.check_vocab(settings.vocab)
    wanted = completion_limit(length, params.max_tokens, settings.max_model_len)
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise BadInput(f"timeout_s={request.timeout_s} is over before it begins; give a time above 0")
    if params.structure is not None and constraint is None:
        raise BadInput(f"this engine cannot constrain the output to a {params.structure.kind}; leave structure out")
    tokens, longest = length + wanted, cache.longest(length + wanted)
    if longest < tokens:
        raise BadInput(
            f"prompt and output of {tokens:,} tokens need {cache.blocks_at(tokens):,} KV blocks and the "
            f"cache has {cache.num_blocks:,}; ask for at most {longest:,} together or raise "
            "serve.kv_bytes"
        )
    return tokens


def completion_limit(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Tokens that a completion may have; ContextLengthExceeded where prompt and completion do not fit."""
    left = max_model_len - prompt_tokens
    if left < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens:,} tokens and prompt and completion may have {max_model_len:,} together; "
            f"shorten it to {max_model_len - 1:,} or raise serve.max_model_len and serve.kv_bytes"
        )
    if max_tokens is not None and max_tokens > left:
        raise ContextLengthExceeded(
            f"a prompt of {prompt_tokens:,} tokens and max_tokens={max_tokens:,} exceed max_model_len="
            f"{max_model_len:,}; ask for at most {left:,}"
        )
    return left if max_tokens is None else max_tokens


def _check_prompt(request: Request, settings: Settings) -> None:
    prompt = request.prompt
    if not len(prompt):
        raise BadInput("the prompt is empty; give at least one token")
    if list(map(type, prompt)).count(int) != len(prompt):
        wrong = next(token for token in prompt if type(token) is not int)
        raise BadInput(f"the prompt has {wrong!r} among its token ids; give whole numbers")
    distinct = set(prompt)
    if min(distinct) < 0 or max(distinct) >= settings.vocab:
        wrong = next(token for token in prompt if not 0 <= token < settings.vocab)
        raise BadInput(f"the prompt has token {wrong} outside the vocabulary of {settings.vocab:,}; use its tokenizer")


def make_sequences(
    request: Request, limit: int, settings: Settings, cache: KVCache, constraint: MakeConstraint | None = None
) -> list[Sequence]:
    """The n sequences of a checked request; all but the first are forks of the first."""
    params = request.params
    constraint = limited(params, settings.vocab, constraint)
    stops = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else settings.eos_ids)
    long_rope = settings.rope_switch is not None and len(request.prompt) > settings.rope_switch
    chain = cache.chain(list(request.prompt), request.salt, request.adapter + (LONG_ROPE if long_rope else ""))
    sequences = [Sequence(request, i, chain.copy() if i else chain, limit, stops) for i in range(params.n)]
    for seq in sequences:
        seq.long_rope = long_rope
        if constraint is not None:
            seq.constraint, seq.watched = constraint(), EVERY_TOKEN
        seq.blocks_at_limit = cache.blocks_at(limit)
        seq.blocks_at_start = cache.blocks_at(seq.num_prompt)
    sequences[0].forks = sequences[1:]
    for fork in sequences[1:]:
        fork.leader = sequences[0]
    return sequences
