"""Gives a server's engine its part in disaggregated serving: `serve.role=prefill` or `decode`."""

from __future__ import annotations

from pathlib import Path

from armillary.engine.disaggregation.block_bytes import BlockBytes, fingerprint
from armillary.engine.disaggregation.decode_side import DecodeSide
from armillary.engine.disaggregation.prefill_side import PrefillSide
from armillary.engine.engine import Engine
from armillary.engine.engine_thread import EngineThread
from armillary.engine.runner.executor import FastExecutor
from armillary.errors import BadInput
from armillary.spec.tables.serve import Serve


def refuse_role(serve: Serve, ranks: int) -> None:
    """BadInput where several ranks would share a part: blocks are exchanged whole."""
    if serve.role != "combined" and ranks > 1:
        raise BadInput(f"serve.role={serve.role} is for one device per server yet; start it without --tp")


def connect(engine: Engine, worker: EngineThread, serve: Serve, folder: Path) -> PrefillSide | DecodeSide:
    """Listen for decode servers, or connect to the prefill server; BadInput where the model's past cannot be sent as
    blocks, or the other side serves something else."""
    executor, cache = engine.loop.executor, engine.scheduler.cache
    assert isinstance(executor, FastExecutor), "one rank computes"
    config = executor.forward.model.config
    if cache.has_states:
        raise BadInput(f"{config.name} has recurrent states, which blocks do not hold; leave serve.role=combined")
    if engine.scheduler.settings.rope_switch is not None:
        raise BadInput(f"{config.name} changes its RoPE with the length of a prompt; leave serve.role=combined")
    blocks = BlockBytes(executor.rows, cache)
    dtype = f"{next(executor.forward.model.parameters()).dtype} {serve.weights}"
    same = fingerprint(config, folder, dtype, blocks.layout())
    if serve.role == "prefill":
        prefill = PrefillSide(
            worker, blocks, fingerprint=same, address=serve.prefill, window_bytes=serve.prefill_ahead_bytes
        )
        engine.transfer = prefill
        prefill.start_listening()
        return prefill
    decode = DecodeSide(worker, blocks, fingerprint=same, address=serve.prefill, min_tokens=serve.prefill_min_tokens)
    engine.transfer = decode
    decode.connect()
    return decode
