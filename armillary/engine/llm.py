"""A model as a Python object: `LLM("folder").generate(["Once upon"], SamplingParams(max_tokens=20))`.

`stream` yields the output as it comes in an event loop; a server runs the engine in an `EngineThread` of its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from armillary.engine.adapter_table import AdapterTable
from armillary.engine.build import Phase, make_engine
from armillary.engine.engine import Completion, Record
from armillary.engine.engine_thread import EngineThread
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.output.structured import Structures
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.rank_layout import RankLayout, rank_layout
from armillary.engine.runner.ranks.step_reports import StepReports
from armillary.engine.runner.sharded_weights import load_shard
from armillary.engine.runner.tensor_parallel import Leader, Obeys, follow
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.errors import BadInput
from armillary.kernels.core.dtype import parse_dtype
from armillary.model.device import pick_device
from armillary.model.generation_config import sampling_defaults
from armillary.model.multi_token import MtpLayer
from armillary.model.text.tokenizer import Tokenizer, eos_ids_of
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model
from armillary.model.weights.mtp_weights import load_draft_head
from armillary.parallel.collectives import all_reduce
from armillary.parallel.mesh import machines_of
from armillary.parallel.world import World
from armillary.profiling.ceilings.ceilings import name_of
from armillary.profiling.dtypes.choice import resolve_serving, serving_shape
from armillary.profiling.dtypes.rates import DTYPES, device_rates
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve
from armillary.store.adapter_folders import adapter_folders
from armillary.store.hf_folder import stored_dtype
from armillary.store.home import Home
from armillary.store.peaks import load_peaks
from armillary.store.resolve_model import ModelSource, resolve_model

Prompt = str | Items[int]


def dtype_to_load(
    source: ModelSource, serve: Serve, home: Home, device: torch.device, ranks: RankLayout | None = None
) -> str:
    """serve.dtype with auto resolved for the device; ranks that differ all take the narrowest."""
    if serve.dtype != "auto":
        return serve.dtype
    rates = device_rates(home, str(device), serving_shape(source.config, serve))
    index = DTYPES.index(resolve_serving(serve, rates, stored=stored_dtype(source.folder)).dtype)
    if ranks is not None:
        index = int(all_reduce(torch.tensor(index, device=device), ranks.world, "max"))
    return DTYPES[index]


def _ranks(world: World | None, config: ModelConfig, serve: Serve) -> RankLayout | None:
    """The place of this process among several; None where it is alone."""
    if world is not None and world.size > 1:
        return rank_layout(world, config, pp=serve.pp, ep=serve.ep, dp=serve.dp_attention)
    if serve.dp_attention > 1:
        raise BadInput(f"serve.dp_attention={serve.dp_attention} needs as many ranks; start them, or leave it 1")
    if serve.pp > 1 or serve.ep > 1:
        raise BadInput(f"serve.pp={serve.pp} and serve.ep={serve.ep} need several ranks; start them, or leave both 1")
    return None


def _load_draft(
    folder: Path, serve: Serve, home: Home, dtype: str, device: torch.device
) -> Transformer | MtpLayer | None:
    """The model of serve.draft, or the draft head of the model in `folder`."""
    if serve.speculate == "mtp":
        return load_draft_head(folder, dtype=dtype, device=device)
    if not serve.draft:
        return None
    source = resolve_model(serve.draft, home, need_weights=True)
    assert source.folder is not None
    return load_model(source.folder, dtype=dtype, device=device, packed=True)


class LLM:
    """A model and its tokenizer, ready to generate; without a tokenizer it takes and gives token ids."""

    def __init__(
        self,
        model: str | Path,
        serve: Serve | None = None,
        *,
        home: Home | None = None,
        dtype: str | None = None,
        device: str | None = None,
        record: Record | None = None,
        phase: Phase | None = None,
        world: World | None = None,
    ) -> None:
        """With a `world` of several ranks (parallel.world) the model is sharded over them: the first rank serves until
        it is closed, the others `follow`."""
        source = resolve_model(str(model), home or Home.default(), need_weights=True)
        assert source.folder is not None
        begin = time.monotonic()
        serve = serve or Serve()
        self.ranks = ranks = _ranks(world, source.config, serve)
        where = world.device if world else pick_device(device)
        dtype = dtype or dtype_to_load(source, serve, home or Home.default(), where, ranks)
        loaded = (
            load_model(source.folder, dtype=dtype, device=where, packed=True)
            if world is None or ranks is None
            else load_shard(
                source.folder,
                source.config,
                dtype=parse_dtype(dtype),
                device=where,
                ranks=ranks,
                machines=machines_of(world),
            )
        )
        if phase is not None:
            phase("weights", time.monotonic() - begin)
        has_text = (source.folder / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.load(source.folder) if has_text else None
        self.engine, self.plan = make_engine(
            loaded,
            self.tokenizer,
            serve,
            record=record,
            phase=phase,
            ranks=ranks,
            owns_model=True,
            draft=_load_draft(source.folder, serve, home or Home.default(), dtype, where),
            eos_ids=() if has_text else eos_ids_of(source.folder),
            peaks=load_peaks(home or Home.default(), name_of(next(loaded.parameters()).device)),
        )
        self.structures = Structures(self.tokenizer, loaded.config.vocab)
        own = sampling_defaults(source.folder if serve.generation_config == "auto" else None).given
        own["max_tokens"] = own.pop("max_new_tokens", None)
        self.default_params = SamplingParams(**own)
        """used where a call gives none: the model's own, from generation_config.json"""
        self.notes: tuple[str, ...] = ()  # for the user who starts it, one line each
        longest, context = self.engine.scheduler.settings.max_model_len, loaded.config.context
        if serve.max_model_len is None and longest != context:
            self.notes = (
                f"max_model_len is {longest:,} and not the context of {context:,}: the KV cache holds no more; raise "
                "serve.kv_bytes for longer answers",
            )
        self._numbers = count(1)
        self._thread: EngineThread | None = None
        self._adapters: dict[str, str] = {}  # name for the user -> that of the engine
        leader = self.engine.loop.executor
        if isinstance(leader, Leader) and leader.leads:
            leader.connect()
        if serve.adapters and (world is None or world.is_main):
            for name, path in adapter_folders(serve.adapters).items():
                self.load_adapter(name, path)

    def generate(
        self,
        prompts: Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        adapter: str | Items[str] = "",
    ) -> list[Completion]:
        """Complete texts or token ids, in order, n completions each; an invalid prompt gives a completion with an
        error. `adapter` names a loaded LoRA adapter, for all prompts or for each."""
        if self._thread is not None:
            raise BadInput("this engine is streaming; await `stream`, or `close` it first")
        if isinstance(prompts, str | bytes):
            raise BadInput("prompts is a single text; give a list of prompts")
        given = [params or self.default_params] * len(prompts) if not isinstance(params, Items) else list(params)
        if len(given) != len(prompts):
            raise BadInput(f"{len(prompts)} prompts have {len(given)} parameters; give one for all, or one each")
        names = [adapter] * len(prompts) if isinstance(adapter, str) else list(adapter)
        if len(names) != len(prompts):
            raise BadInput(f"{len(prompts)} prompts have {len(names)} adapters; give one for all, or one each")
        requests, unreadable = self._requests(prompts, given, names)
        constraints = {request.id: maker for request in requests if (maker := self._constraint(request.params))}
        completions = self.engine.generate(
            [request for request in requests if request.id not in unreadable], constraints
        )
        completions += [
            Completion(request=request, finish="error", error=unreadable[request.id])
            for request in requests
            if request.id in unreadable
        ]
        return sorted(completions, key=lambda each: int(each.request.id))  # the n of a prompt keep their order

    def _requests(
        self, prompts: Items[Prompt], given: Items[SamplingParams], adapters: Items[str]
    ) -> tuple[list[Request], dict[str, str]]:
        """A request per prompt, and request id -> error for prompts without tokens."""
        requests, unreadable = [], {}
        for prompt, params, adapter in zip(prompts, given, adapters, strict=True):
            try:
                requests.append(self._request(prompt, params, adapter))
            except BadInput as error:
                requests.append(Request(id=str(next(self._numbers)), prompt=[], params=params))
                unreadable[requests[-1].id] = str(error)
        return requests, unreadable

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str = ""
    ) -> AsyncIterator[OutputDelta]:
        """Deltas of the output as they come; many streams may run at once. Leaving the loop early aborts the
        request."""
        if self._thread is None:
            self._thread = EngineThread(self.engine).start()
        request = self._request(prompt, params or self.default_params, adapter)
        async for delta in self._thread.stream(request, self._constraint(request.params)):
            yield delta

    def follow(self, transfer: Obeys | None = None) -> int:
        """On the other ranks: run the steps that the first rank sends until it is closed; returns their number.
        `transfer` exchanges KV blocks with another engine, where serve.role says so."""
        leader = self.engine.loop.executor
        if not isinstance(leader, Leader):
            raise BadInput("this engine is alone and leads itself; call generate")
        reports = StepReports if self.ranks is not None and self.ranks.reports else None
        return follow(leader.executor, transfer, reports)

    def close(self) -> None:
        """End the thread of `stream`, and stop the other ranks."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        leader = self.engine.loop.executor
        if isinstance(leader, Leader) and leader.leads:
            leader.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams, adapter: str = "") -> Request:
        if adapter and adapter not in self._adapters:
            raise BadInput(f"no adapter '{adapter}' is loaded; call load_adapter first")
        return Request(
            id=str(next(self._numbers)),
            prompt=self._tokens(prompt),
            params=params,
            adapter=self._adapters.get(adapter, ""),
        )

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter, as peft or `armillary train` writes it, for `generate(…, adapter=name)`."""
        if not name or name in self._adapters:
            raise BadInput(f"an adapter '{name}' is loaded already; give another name, or unload it first")
        table, key = self._adapter_table, f"{name}#{next(self._numbers)}"
        table.add(key, table.read(folder))
        self._adapters[name] = key

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that use it end as they began."""
        if name not in self._adapters:
            raise BadInput(f"no adapter '{name}' is loaded ({', '.join(self._adapters) or 'none is'}); check its name")
        self._adapter_table.remove(self._adapters.pop(name))

    @property
    def _adapter_table(self) -> AdapterTable:
        if self._thread is not None:
            raise BadInput("this engine is streaming; load and unload adapters before")
        assert self.engine.adapters is not None
        return self.engine.adapters

    def _tokens(self, prompt: Any) -> Items[int]:
        """Token ids of a text, list or array."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise BadInput("this model has no tokenizer.json; give token ids")
            return self.tokenizer.encode(prompt)
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, bytes) or not isinstance(prompt, Items):
            raise BadInput(f"a prompt is of type {type(prompt).__name__}; give text or a list of token ids")
        if set(map(type, prompt)) <= {int}:
            return prompt
        return [int(x) if isinstance(x, Integral) and not isinstance(x, bool) else x for x in prompt]

    def _constraint(self, params: SamplingParams) -> MakeConstraint | None:
        return None if params.structure is None else self.structures.maker(params.structure)
