"""Who reads what, worked out and carried out without ranks: shards are right and every byte is read once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from armillary.model.random_values import all_of, fill_normal
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_layout import rules
from armillary.model.weights.hf_weights import full_names
from armillary.model.weights.row_map import row_map
from armillary.model.weights.safetensors_folder import StoredTensor
from armillary.parallel.loading import read_plan, shard_loader
from armillary.parallel.loading.byte_ranges import ByteRanges
from armillary.parallel.loading.model_folder import source_of
from armillary.parallel.loading.read_plan import Need, Read, Source, Span, box_need, plan_reads, shard_box, tensor_rows
from armillary.spec.model import ModelConfig
from tests.model.layers.test_attention_forms import small

MODELS = {
    "llama": small(qkv_bias=True),
    "phi3, stacked qkv and gate_up": small(family="phi3"),
    "experts": small(family="glm4_moe", moe={"num_experts": 6, "top_k": 2, "ffn": 12, "shared_ffn": 20}),
    "experts, transposed": small(
        family="gpt_oss",
        sinks=True,
        moe={"num_experts": 6, "top_k": 2, "ffn": 12, "router_bias": True, "expert_bias": True},
    ),
    "experts, transposed, gates before ups": small(
        family="llama4_text", moe={"num_experts": 6, "top_k": 1, "ffn": 12, "shared_ffn": 12, "scale_input": True}
    ),
}
# dim 0 over ranks of FSDP, after rows or columns over those of tp
TP_FSDP = {"qkv": 0, "up.weight": 0, "up_E2FH": 1, "out.weight": 1, "down.weight": 1, "down_EHF": 2, "embedding": 0}


def stored_sources(config: ModelConfig, path: Path) -> tuple[list[Source], dict[str, Tensor]]:
    """A file with the tensors of some rules, where they are in it, and ours joined from them."""
    tensors, joined, places = {}, {}, []
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in full_names(Transformer(config)).items()}
    for rule in rules(config):
        full = torch.empty(shapes[rule.name])
        fill_normal(all_of(full), seed=1, name=rule.name, std=1.0)
        joined[rule.name] = full
        tensors |= {name: part.contiguous().clone() for name, part in zip(rule.hf_names, rule.split(full), strict=True)}
    save_file(tensors, path)
    offset = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    header = dict(header_of(path))
    for rule in rules(config):
        stored = [
            StoredTensor(str(path), offset + header[name], tensors[name].shape, torch.float32) for name in rule.hf_names
        ]
        places.append(source_of(rule, stored))
    return places, joined


def header_of(path: Path) -> Iterator[tuple[str, int]]:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    for name, about in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            yield name, about["data_offsets"][0]


def carried_out(reads: list[Read], targets: dict[int, dict[str, Tensor]]) -> int:
    """All ranks in one process; the bytes that they read."""
    with ByteRanges() as ranges:
        for read in reads:
            block = torch.empty(read.rows.size, read.columns.size, dtype=read.stored.dtype)
            shard_loader.read_rows(ranges, read.stored, read.rows, read.columns, block)
            for use in read.uses:
                target = targets[use.rank][read.name]
                matrix = target.view(-1, target.shape[-1] if target.ndim > 1 else 1)
                shard_loader.place(matrix, shard_loader.columns_of(block, read, use), use)
    return ranges.bytes_read


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 1), (1, 4), (4, 3)], ids=lambda s: f"tp{s[0]} × fsdp{s[1]}")
@pytest.mark.parametrize("model", MODELS)
def test_shards_of_one_machine_are_read_once(
    model: str, sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_plan, "BLOCK_BYTES", 300)
    monkeypatch.setattr(read_plan, "SHARED_BYTES", 100)
    sources, wanted = stored_sources(MODELS[model], tmp_path / "m")
    boxes, needs, targets = boxes_of(wanted, *sizes)
    reads = plan_reads(sources, needs)
    total = sum(4 * tensor.numel() for tensor in wanted.values())
    assert sum(read.nbytes for read in reads) == total
    assert carried_out(reads, targets) == total
    for rank, held in targets.items():
        for name, tensor in held.items():
            offsets, shape = boxes[rank, name]
            index = tuple(slice(a, a + b) for a, b in zip(offsets, shape, strict=True))
            assert torch.equal(tensor, wanted[name][index]), (rank, name)
    loads = Counter({rank: sum(read.nbytes for read in reads if read.reader == rank) for rank in needs})
    assert max(loads.values()) <= 1.3 * total / len(needs) + 4 * 300


def boxes_of(wanted: dict[str, Tensor], tp: int, fsdp: int) -> tuple[dict[Any, Any], dict[int, Any], dict[int, Any]]:
    boxes, needs, targets = {}, {}, {}
    for rank, (t, f) in enumerate(product(range(tp), range(fsdp))):
        needs[rank], targets[rank] = {}, {}
        for name, tensor in wanted.items():
            dim = next((dim for key, dim in TP_FSDP.items() if key in name and tensor.ndim > 1), None)
            shards = [] if dim is None else [(dim, tp, t)]
            box = boxes[rank, name] = shard_box(tensor.shape, [*shards, (0, fsdp, f)])
            needs[rank][name] = box_need(tensor.shape, *box)
            targets[rank][name] = torch.full(box[1], torch.nan)
    return boxes, needs, targets


def test_shards_are_those_of_torch_chunk() -> None:
    full = torch.arange(7 * 5).view(7, 5)
    for rank, part in enumerate(full.chunk(3, dim=0)):
        (row, _), (rows, _) = shard_box(full.shape, [(0, 3, rank)])
        assert torch.equal(full[row : row + rows], part)
    assert shard_box((5, 4), [(0, 4, 3)]) == ((5, 0), (0, 4)), "5 rows leave nothing for the last of 4 ranks"


def two_halves() -> tuple[list[Source], dict[int, dict[str, Need]]]:
    stored = tensor_rows("file", 100, (8, 6), torch.float32)
    source = Source("w", row_map(lambda parts: parts[0], [(8, 6)]), [[stored]])
    return [source], {rank: {"w": Need((Span(0, 8),), Span(3 * rank, 3 * rank + 3))} for rank in (0, 1)}


def test_ranks_that_share_rows_read_full_rows_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of each row would be 16 small reads."""
    assert [(read.reader, read.rows, read.columns) for read in plan_reads(*two_halves())] == [
        (0, Span(0, 8), Span(0, 6))
    ]
    monkeypatch.setattr(read_plan, "SHARED_BYTES", 100)
    reads = plan_reads(*two_halves())
    assert [(read.reader, read.rows, read.columns) for read in reads] == [
        (0, Span(0, 4), Span(0, 6)),
        (1, Span(4, 8), Span(0, 6)),
    ]
    assert [use.columns for use in reads[0].uses] == [Span(0, 3), Span(3, 6)]


def test_a_rank_alone_on_its_machine_reads_its_columns_only() -> None:
    sources, needs = two_halves()
    reads = plan_reads(sources, {1: needs[1]})
    assert {(read.reader, read.columns) for read in reads} == {(1, Span(3, 6))}
    assert sum(read.nbytes for read in reads) == 8 * 3 * 4


def test_joins_map_to_few_runs() -> None:
    """Gate and up are one run each, every second row of ours; q, k and v one for each KV head."""
    config = small(heads=8, kv_heads=2)
    by_name = {rule.name: rule for rule in rules(config)}
    up = by_name["blocks.0.mlp.up.weight"]
    assert row_map(up.join, [(24, 32)] * 2) == [(0, 0, 24, 0, 2), (1, 0, 24, 1, 2)]
    qkv, dim = by_name["blocks.0.attention.qkv.weight"], config.head_dim
    assert len(row_map(qkv.join, [(8 * dim, 32), (2 * dim, 32), (2 * dim, 32)])) == 6
