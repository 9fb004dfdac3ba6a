"""One request as it enters the engine: tokens, sampling parameters and priority."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from armillary.engine.request.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt and how to complete it."""

    id: str
    """unique among unfinished requests"""
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """smaller goes first; each level is worth serve.ageing_s seconds of waiting"""
    timeout_s: float | None = None
    """aborted so long after its arrival; none: never"""
    salt: str = ""
    """only requests with the same salt share cached blocks"""
    adapter: str = ""
    """LoRA adapter of the request; only requests with the same adapter share cached blocks"""
