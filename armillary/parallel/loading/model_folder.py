"""Loads each rank's parts of the tensors of a Hugging Face folder, read once per machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from armillary.model.transformer import Progress, Transformer
from armillary.model.weights.hf_layout import Rule
from armillary.model.weights.hf_weights import (
    EMBEDDING,
    HEAD,
    check_vocabulary,
    has_tied_copy,
    stored_parts,
    tied_differs,
)
from armillary.model.weights.row_map import column_map, row_map
from armillary.model.weights.safetensors_folder import StoredTensor, TensorFolder
from armillary.parallel.consensus import Consensus
from armillary.parallel.loading.read_plan import Need, Source, StoredRows, Twin, expert_rows, plan_reads, tensor_rows
from armillary.parallel.loading.shard_loader import Loaded, load_shards, needs_of_machine


def load_folder(
    model: Transformer,
    folder: Path | str,
    targets: Mapping[str, Tensor],
    needs: Mapping[str, Need],
    *,
    ranks: Consensus | None = None,
    machines: Sequence[str] = (),
    progress: Progress | None = None,
) -> Loaded:
    """Fill `targets`, this rank's parts of tensors by their names in the complete model, with what `needs` says they
    hold; the folder is checked against `model`, on meta or sharded.

    With `ranks`, which all call this together, and the machine of each of them, what several ranks of a machine need is
    read once and forwarded; without, this rank reads all that it needs."""
    ranks = ranks or Consensus(rank=0, size=1)
    sources = ranks.run_on_all(lambda: folder_sources(model, folder))
    reads = plan_reads(sources, needs_of_machine(needs, ranks, machines))
    return load_shards(reads, targets, rank=ranks.rank, progress=progress)


def folder_sources(model: Transformer, folder: Path | str) -> list[Source]:
    """All tensors of the complete model of which `model` is a stage or a shard, checked before any of them is read."""
    with TensorFolder(folder) as stored:
        check_vocabulary(model.config, stored)
        twin = None
        if has_tied_copy(model.config, stored):
            twin = Twin(_rows(stored.where(HEAD)), tied_differs(model.config))
        return [
            source_of(rule, parts, twin if rule.hf_names == (EMBEDDING,) else None)
            for rule, parts in stored_parts(model, stored)
        ]


def source_of(rule: Rule, parts: Sequence[StoredTensor], twin: Twin | None = None) -> Source:
    """One of our tensors, from where its parts are stored."""
    if rule.transposed:
        (part,) = parts
        return Source(rule.name, column_map(rule.join, part.shape), expert_rows(*part), transposed=True)
    runs = row_map(rule.join, [part.shape for part in parts])
    return Source(rule.name, runs, [[_rows(part)] for part in parts], twin)


def _rows(stored: StoredTensor) -> StoredRows:
    return tensor_rows(stored.path, stored.offset, stored.shape, stored.dtype)
