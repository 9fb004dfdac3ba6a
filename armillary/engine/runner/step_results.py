"""What a step gives besides its tokens, stored where it belongs: log-probabilities of tokens and prompts, and the draft
tokens that a draft model has proposed."""

from torch import Tensor

from armillary.engine.request.sequence import Logprob, Sequence
from armillary.engine.runner.step_input import Step
from armillary.engine.scheduler.decision import Decision


def sampled_sequence(decision: Decision, at: int) -> Sequence:
    """The sequence of row `at` of a step."""
    first = len(decision.decodes)
    return decision.decodes[at] if at < first else decision.chunks[at - first].sequence


def set_drafts(decision: Decision, tokens: list[int]) -> None:
    """Give the drafts of a step the tokens that the draft model has proposed."""
    at = 0
    for draft in decision.drafts:
        draft.tokens, at = tokens[at : at + draft.count], at + draft.count


def store_logprobs(decision: Decision, step: Step, logprobs: Tensor, tokens: list[int]) -> None:
    """Log-probabilities of the sequences that want them (`DeviceSampler.logprobs`)."""
    wanted = [extra for extra in step.extras if extra.num_top is not None]
    for extra, row in zip(wanted, logprobs.tolist(), strict=True):
        logprob = _logprob(tokens[extra.at], row, extra.num_top or 0)
        sampled_sequence(decision, extra.at).logprobs.append(logprob)


def store_prompt_logprobs(decision: Decision, step: Step, prompts: list[Tensor]) -> None:
    """Store log-probabilities of prompt tokens, each position once, however often it is computed."""
    chunks = [
        c
        for c in decision.chunks
        if c.sequence.request.params.prompt_logprobs is not None
        and min(c.start + c.size, c.sequence.num_prompt - 1) > c.start
    ]
    for chunk, wanted, logprobs in zip(chunks, step.prompts, prompts, strict=True):
        stored, skipped = chunk.sequence.prompt_logprobs, len(chunk.sequence.prompt_logprobs) - chunk.start
        if 0 <= skipped < wanted.size:
            stored += [
                _logprob(token, row, wanted.num_top)
                for token, row in zip(wanted.targets[skipped:], logprobs[skipped:].tolist(), strict=True)
            ]


def _logprob(token: int, row: list[float], num_top: int) -> Logprob:
    """From a row of `DeviceSampler.logprobs`."""
    most = (len(row) - 1) // 2
    ids = map(int, row[1 + most : 1 + most + num_top])
    return Logprob(token, row[0], tuple(zip(ids, row[1 : 1 + min(most, num_top)], strict=True)))
