"""Run the OpenAI-compatible server: bind, start the engine, serve until a signal, drain, and exit with 0."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.model.generation_config import sampling_defaults
from armillary.model.pooling_config import PoolingConfig, pooling_config
from armillary.model.text.tokenizer import eos_ids_of
from armillary.serving.http.server import (
    ListenOptions,
    Say,
    Tls,
    address_of,
    bind,
    http_server,
    ignore_broken_pipe,
    require_http,
    run_event_loop,
    serve_until_signal,
)
from armillary.serving.openai.promotion import FollowedAlias, PromotionWatcher
from armillary.serving.openai.reasoning import reasoning_format_of
from armillary.serving.openai.served_model import ServedModel
from armillary.serving.openai.tokenization import Tokenization
from armillary.serving.openai.tool_calls import family_of
from armillary.serving.openai.tracing import Tracing
from armillary.serving.processes.engine_client import EngineClient
from armillary.serving.processes.engine_ipc import EngineConfig
from armillary.serving.processes.server_metrics import Metrics
from armillary.spec.tables.serve import Serve
from armillary.store.registry.release import Release
from armillary.store.resolve_model import ModelSource, release_source

if TYPE_CHECKING:
    from armillary.serving.http.front import Front
    from armillary.serving.openai.app import Api

_PRIVATE = (
    "api_key_file",
    "otlp",
    "trusted_keys",
    "access_log",
    "tls_certificate",
    "tls_key",
    "cors_origins",
    "prefill",
    "nodes",
    "node_rank",
)
_GRACE_S = 10
"""seconds after drain_s until uvicorn cuts connections itself"""


def serve(
    source: ModelSource,
    config: EngineConfig,
    listen: ListenOptions,
    *,
    ranks: int = 1,
    follow: FollowedAlias | None = None,
    say: Say = print,
) -> None:
    """Serve until SIGTERM or SIGINT; ArmillaryError where the model cannot be loaded or the port is in use. With
    `follow`, what is promoted to an alias of the registry is served as soon as it is loaded."""
    require_http()
    say, metrics = ignore_broken_pipe(say), Metrics(vllm=config.serve.metrics == "vllm")
    served = served_model(source, config, ranks, metrics, say)
    metrics.info = _info(served, config)
    from armillary.serving.http.front import Front  # both need the packages that require_http has just checked
    from armillary.serving.openai.app import Api

    tracing = Tracing(config.serve.otlp, served.name) if config.serve.otlp else None
    api = Api(served, metrics, keys=listen.keys, tracing=tracing, say=say)
    successor = partial(_successor, config=config, ranks=ranks, metrics=metrics, say=say, name=served.name)
    watcher = None if follow is None else PromotionWatcher(api, follow, successor, say)
    front = Front(api.app(), listen, say)
    try:
        run_event_loop(_serve(api, front, bind(listen), listen.tls, say, watcher))
    finally:
        front.close()
    if tracing is not None:
        tracing.close()


def served_model(source: ModelSource, config: EngineConfig, ranks: int, metrics: Metrics, say: Say) -> ServedModel:
    assert source.folder is not None, "a model that is served has weights"
    tokenization = Tokenization(source.folder, eos_ids_of(source.folder))
    templates = list(tokenization.tokenizer.templates.values()) if tokenization.tokenizer else []
    family, reasoning = family_of(templates), reasoning_format_of(templates)
    serve = config.serve
    defaults = sampling_defaults(source.folder if serve.generation_config == "auto" else None)
    if defaults.given:
        say(
            f"sampling defaults of the model (generation_config.json): {defaults}; --set serve.generation_config=none "
            "for neutral ones"
        )
    pooling = pooling_of(source.folder, serve)
    judges = "rerank" in source.name.lower() and not pooling.described
    return ServedModel(
        name=serve.name or source.name,
        tokenization=tokenization,
        serve=serve,
        created=int(time.time()),
        defaults=defaults,
        pooling=pooling,
        scoring=("yes_no" if judges else "embedding") if serve.scoring == "auto" else serve.scoring,
        hidden=source.config.hidden,
        context=serve.max_model_len or source.config.context,
        tools=family if serve.tools == "auto" else serve.tools,
        reasoning={"auto": reasoning, "none": None}.get(serve.reasoning, serve.reasoning),
        engine=EngineClient(config, ranks=ranks, metrics=metrics, say=say),
    )


def pooling_of(folder: Path, serve: Serve) -> PoolingConfig:
    """How embeddings are pooled: as the recipe says, else as the model's folder says."""
    if serve.pooling == "none":
        return PoolingConfig(unsupported="serve.pooling=none")
    own = pooling_config(folder)
    return own if serve.pooling == "auto" else replace(own, mode=serve.pooling, unsupported="")


def _successor(
    release: Release, folder: Path, *, config: EngineConfig, ranks: int, metrics: Metrics, say: Say, name: str
) -> ServedModel:
    """The model of another release, served under the same name with the same settings; its gauges go to a file of their
    own."""
    source = replace(release_source(release, folder, need_weights=True), name=name)
    gauges = config.gauges and config.gauges.with_name(f"gauges.{release.version}-{release.digest[:8]}.jsonl")
    return served_model(source, replace(config, model=str(folder), gauges=gauges), ranks, metrics, say)


def _info(served: ServedModel, config: EngineConfig) -> dict[str, str]:
    """Labels of armillary_serve_info: the keys of [serve] as `--set serve.KEY=` takes them, and the run whose gauges
    the engine writes. /metrics needs no API key, so the place of the key file and the trace collector are left out."""
    run = {"run": config.gauges.parent.name} if config.gauges is not None else {}
    values = {
        name: "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in asdict(config.serve).items()
        if name not in _PRIVATE
    }
    return {"model": served.name, **run, **values}


async def _serve(
    api: Api, front: Front, sock: socket.socket, tls: Tls | None, say: Say, watcher: PromotionWatcher | None
) -> None:
    """Serve while the engine starts; an engine that cannot start ends the server."""
    drain_s = api.served.serve.drain_s
    server = http_server(front, graceful_s=int(drain_s) + _GRACE_S, tls=tls)

    def abort() -> None:
        api.served.engine.abort_all("the server is shutting down; send the request to another server")

    def drain() -> None:
        api.draining = True
        if api.metrics.inflight:
            say(f"draining: {api.metrics.inflight} requests in flight, at most {drain_s:g} s; signal again to end them")
        asyncio.get_running_loop().call_later(drain_s, abort)

    serving = asyncio.create_task(serve_until_signal(server, sock, drain=drain, kill=abort))
    try:
        starting = asyncio.create_task(_start(api, address_of(sock, tls), say))
        if watcher is not None:
            starting.add_done_callback(watcher.start)
        await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is not None:
            server.should_exit = True
            await serving
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        await serving
    finally:
        if watcher is not None:
            await watcher.stop()
        await api.served.engine.stop()


async def _start(api: Api, address: str, say: Say) -> None:
    """Start the engine, and report the time of each phase."""
    say(f"loading '{api.served.name}' ({address}/ready answers 200 once it takes requests)")
    started = await api.served.engine.start()
    gc.collect()
    gc.freeze()  # long-lived objects are not traversed again while requests are served
    say(f"loaded: {' · '.join(f'{name} {seconds:.2f} s' for name, seconds in started.phases)}")
    for line in (started.kv_text, *started.notes):
        say(line)
    say(f"ready on {address} as '{api.served.name}' (chat page at /, docs at /openapi.json)")
