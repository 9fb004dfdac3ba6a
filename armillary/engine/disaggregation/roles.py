"""Gives a server's engine its part in disaggregated serving: `serve.role=prefill` or `decode`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from armillary.engine.disaggregation.block_bytes import BlockBytes, fingerprint
from armillary.engine.disaggregation.decode_rank import DecodeRank
from armillary.engine.disaggregation.decode_side import DecodeSide
from armillary.engine.disaggregation.prefill_rank import PrefillRank
from armillary.engine.disaggregation.prefill_side import PrefillSide
from armillary.engine.engine import Engine
from armillary.engine.engine_thread import EngineThread
from armillary.engine.runner.draft_model import DraftModel
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.step_bytes import RankMessage
from armillary.engine.runner.tensor_parallel import Leader
from armillary.errors import BadInput
from armillary.parallel.collectives import Group
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve


def connect(
    engine: Engine, worker: EngineThread, serve: Serve, folder: Path, group: Group | None = None
) -> PrefillSide | DecodeSide:
    """On the first rank of `group`: listen for decode servers, or connect to the prefill server; BadInput where the
    model's past cannot be sent as blocks, or the other side serves something else."""
    leader = engine.loop.executor
    executor, blocks, rank = _parts(engine, serve, group)
    config = executor.forward.model.config
    dtype = f"{next(executor.forward.model.parameters()).dtype} {serve.weights}"
    same = fingerprint(config, folder, dtype, blocks.layout(config, rank.ranks // serve.pp))

    def order(what: dict[str, Any]) -> None:
        if isinstance(leader, Leader):
            leader.channel.send(RankMessage(transfer=what))

    if isinstance(rank, PrefillRank):
        prefill = PrefillSide(
            worker,
            blocks,
            rank,
            fingerprint=same,
            address=serve.prefill,
            window_bytes=serve.prefill_ahead_bytes,
            order=order,
        )
        engine.transfer = prefill
        return prefill
    decode = DecodeSide(
        worker,
        blocks,
        rank,
        fingerprint=same,
        address=serve.prefill,
        min_tokens=serve.prefill_min_tokens,
        whole_bytes=blocks.whole_bytes(_kv_heads(config), rank.ranks),
        order=order,
    )
    engine.transfer = decode
    decode.connect()
    return decode


def follower(engine: Engine, serve: Serve, group: Group) -> PrefillRank | DecodeRank:
    """On the other ranks: what obeys the first one's orders between steps."""
    _, _, rank = _parts(engine, serve, group)
    if isinstance(rank, PrefillRank):
        rank.listen(serve.prefill)
    return rank


def _parts(
    engine: Engine, serve: Serve, group: Group | None
) -> tuple[FastExecutor, BlockBytes, PrefillRank | DecodeRank]:
    """BadInput where the model's past cannot be sent as blocks."""
    leader, cache = engine.loop.executor, engine.scheduler.cache
    executor = leader.executor if isinstance(leader, Leader) else leader
    assert isinstance(executor, FastExecutor), "the model is computed in this process"
    config = executor.forward.model.config
    if cache.has_states:
        raise BadInput(f"{config.name} has recurrent states, which blocks do not hold; leave serve.role=combined")
    if engine.scheduler.settings.rope_switch is not None:
        raise BadInput(f"{config.name} changes its RoPE with the length of a prompt; leave serve.role=combined")
    draft = executor.draft_model
    assert draft is None or isinstance(draft, DraftModel)
    blocks, kv_heads = BlockBytes(executor.rows, cache, draft), _kv_heads(config)
    if serve.role == "decode":
        return executor, blocks, DecodeRank(blocks, group=group, kv_heads=kv_heads, address=serve.prefill)
    rank, ranks = (0, 1) if group is None else (group.rank, group.size)
    prefill = PrefillRank(
        blocks,
        rank=rank,
        ranks=ranks,
        kv_heads=kv_heads,
        window_bytes=serve.prefill_ahead_bytes,
        stages=serve.pp,
    )
    return executor, blocks, prefill


def _kv_heads(config: ModelConfig) -> int:
    """Latents are one head, which every rank has."""
    return 1 if config.mla is not None else config.kv_heads
