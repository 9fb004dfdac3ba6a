"""Counters of an engine since it started."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """Totals since the start; they only grow."""

    steps: int = 0
    submitted: int = 0  # requests accepted
    finished: int = 0  # requests with all completions complete
    aborted: int = 0  # sequences aborted by the client or by a deadline
    rejected: int = 0  # requests refused because the queue was full
    errors: int = 0
    preempted: int = 0
    shrunk: int = 0  # steps that found no memory and were made smaller
    recomputed: int = 0  # computed tokens that preemptions discarded
    looked_up: int = 0  # prompt tokens looked up in the prefix cache, recompute after preemption excluded
    hits: int = 0
    repeated: int = 0  # prompt tokens shared with an earlier sequence, found or not
    misses: Counter[str] = field(default_factory=Counter)  # requests by the reason why no more of the prompt was found
    tokens_in: int = 0
    tokens_out: int = 0
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0  # of those, the ones that became output
    speculated_s: float = 0.0  # time of steps without prefill, where drafts are possible
    plain_s: float = 0.0  # estimate of what their tokens would have taken without drafts
    discarded: int = 0  # tokens sampled for sequences that had ended by then: the price of scheduling a step ahead
