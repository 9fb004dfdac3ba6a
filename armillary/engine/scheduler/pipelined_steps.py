"""Steps of pipeline stages: how the work is divided over the steps that are in flight together.

Every stage works on another step, so that none waits for the others: with S stages S steps are in flight. A sequence
decodes in one of them at a time, since its next token depends on the last one, which only the last stage samples.
Chunks of a prompt depend on no tokens and follow one another in successive steps. A step gets an S-th part of the
decodes and of the prompts, else all of them would pass through the stages together, one stage after the other.
"""

from itertools import islice

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.request_table import RequestTable

_LEAST_CHUNK = 256
"""prompt tokens of a step that are not divided further: fewer take a GPU as long, which reads all weights for them (an
H200 computes 206 tokens in that time by its dense bf16 peak and its bandwidth, spec/hardware.toml)"""


def sequences_of_step(running: list[Sequence], num_stages: int) -> list[Sequence]:
    """Those in prefill, and, in order, at most the S-th part of those that decode, all of them with known tokens."""
    decoding = [seq for seq in running if not seq.is_prefilling]
    most = -(-len(decoding) // num_stages)
    ready = [seq for seq in decoding if not seq.num_pending]
    if len(ready) <= most:
        return [seq for seq in running if seq.is_prefilling or not seq.num_pending]
    last = ready[most - 1].order if most else ()
    return [seq for seq in running if seq.is_prefilling or (not seq.num_pending and seq.order <= last)]


def prefill_of_step(request_table: RequestTable, most: int, num_stages: int) -> int:
    """Prompt tokens of the next step, of at most so many: the S-th part of all that can start."""
    left, wanted = num_stages * most, 0
    for seq in request_table.running:
        if seq.is_prefilling:
            wanted += seq.prefill_target - seq.computed
    for seq in islice(request_table.waiting, len(request_table.rows)):
        if wanted >= left:
            return most
        wanted += seq.prefill_target
    return min(most, max(_LEAST_CHUNK, -(-wanted // num_stages)))
