"""Models as Python objects: `LLM("folder").generate(["Once upon"], SamplingParams(max_tokens=20))`.

`make_engine` is where the parts of an engine are put together; a server hands its engine to a `Worker`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from itertools import count
from pathlib import Path

import torch

from armillary.errors import BadInput
from armillary.model.device import free_bytes, pick_device
from armillary.model.dtype import DTYPES
from armillary.model.tokenizer import Detokenizer, Tokenizer
from armillary.model.transformer import Transformer
from armillary.model.weights import load_model
from armillary.serving.engine.answers import Answers
from armillary.serving.engine.engine import Completion, Engine, Record
from armillary.serving.engine.kv_capacity import KVPlan, plan_kv
from armillary.serving.engine.loop import Loop
from armillary.serving.engine.params import SamplingParams
from armillary.serving.engine.plain_executor import PlainExecutor
from armillary.serving.engine.request import Request
from armillary.serving.engine.scheduler import Scheduler
from armillary.serving.engine.settings import settings_for
from armillary.spec.job import Serve
from armillary.store.home import Home
from armillary.store.source import resolve_model

Prompt = str | Items[int]
_SHARE = {"cuda": 0.8, "cpu": 0.3}
"""of the memory that is free once the weights are in: the rest is for activations, and on a CPU for everybody else"""


class LLM:
    """A model and its tokenizer, ready to answer."""

    def __init__(
        self, model: str | Path, serve: Serve | None = None, *, home: Home | None = None, dtype: str | None = None,
        device: str | None = None, record: Record | None = None,
    ) -> None:  # fmt: skip
        source = resolve_model(str(model), home or Home.default(), need_weights=True)
        assert source.folder is not None
        loaded = load_model(source.folder, dtype=dtype, device=pick_device(device))
        self.tokenizer = Tokenizer.load(source.folder)
        self.engine, self.plan = make_engine(loaded, self.tokenizer, serve or Serve(), record=record)
        self._numbers = count(1)

    def generate(
        self, prompts: Items[Prompt], params: SamplingParams | Items[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answers to texts or token ids, in their order, n each; what is wrong with a prompt is said in its answer."""
        given = [params or SamplingParams()] * len(prompts) if not isinstance(params, Items) else list(params)
        if len(given) != len(prompts):
            raise BadInput(f"{len(prompts)} prompts have {len(given)} parameters; give one for all, or one each")
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return self.engine.generate(
            Request(id=str(next(self._numbers)), prompt=tokens, params=wish)
            for tokens, wish in zip(ids, given, strict=True)
        )


def make_engine(
    model: Transformer, tokenizer: Tokenizer, serve: Serve, *, record: Record | None = None, seed: int | None = None
) -> tuple[Engine, KVPlan]:
    """The parts of an engine, put together; `seed` is of the seeds that requests do not bring themselves."""
    settings = settings_for(model.config, serve, frozenset(tokenizer.eos_ids))
    plan = kv_plan(model, serve, settings.max_model_len)
    scheduler = Scheduler(settings, plan.make(prefix=serve.prefix_cache))
    dice = random.Random(seed)
    executor = PlainExecutor(
        model, scheduler.cache, max_running=settings.max_running, max_model_len=settings.max_model_len,
        new_seed=lambda: dice.getrandbits(61),
    )  # fmt: skip
    loop = Loop(scheduler, executor, overlap=serve.overlap)
    return Engine(loop, Answers(scheduler, lambda: Detokenizer(tokenizer)), record=record), plan


def kv_plan(model: Transformer, serve: Serve, max_model_len: int) -> KVPlan:
    """A cache of serve.kv_bytes, or of a share of what is free, but no more than a full batch can use."""
    weight = next(model.parameters())
    dtype = next(name for name, known in DTYPES.items() if known == weight.dtype)
    if serve.kv_bytes is not None:
        return plan_kv(model.config, serve, serve.kv_bytes, dtype=dtype)
    one = plan_kv(model.config, serve, 1 << 62, dtype=dtype)
    useful = (one.blocks_of(max_model_len) * serve.max_running + 1) * one.block_bytes
    return plan_kv(model.config, serve, min(useful, _share_of_free(weight.device)), dtype=dtype)


def _share_of_free(device: torch.device) -> int:
    free = free_bytes(device)
    if free is None:
        raise BadInput("this machine does not say how much memory is free; set serve.kv_bytes")
    return int(free * _SHARE[device.type])
