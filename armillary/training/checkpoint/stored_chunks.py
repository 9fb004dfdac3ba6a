"""Where the tensors of a checkpoint are in its files, so that a rank reads only the bytes of its own shards.

torch's reader reads every chunk that overlaps a shard in full, on every rank. A chunk that torch.save wrote has the
tensor's bytes at a known place (`container`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from armillary.errors import BadData
from armillary.model.weights.row_map import Run, matrix_shape
from armillary.parallel.consensus import Consensus
from armillary.parallel.loading.read_plan import Source, StoredRows, box_rows, plan_reads
from armillary.parallel.loading.shard_loader import Loaded, load_shards, needs_of_machine
from armillary.parallel.shard_weights import local_needs
from armillary.training.checkpoint.container import container


def read_shards(
    folder: Path, tensors: Mapping[str, Tensor], ranks: Consensus, machines: Sequence[str] = ()
) -> Loaded | None:
    """Fill tensors in place from a full checkpoint, every byte read once per machine; None where its files, or the
    tensors' memory, are of another form. All ranks call this."""
    targets, needs = local_needs(tensors)
    of_ranks = needs_of_machine(needs, ranks, machines)
    names = sorted({name for each in of_ranks.values() for name in each})
    sources = ranks.run_on_all(lambda: chunk_sources(folder, names, tensors))
    usable = sources is not None and all(target.is_contiguous() for target in targets.values())
    if sources is None or ranks.total(float(usable))[0] < ranks.size:
        return None
    return load_shards(plan_reads(sources, of_ranks), targets, rank=ranks.rank)


def chunk_sources(folder: Path, names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[Source] | None:
    """Where the tensors of these names are in a full checkpoint; None where its files are of another form. BadData
    where some are missing, or of another shape than this rank's `tensors`."""
    about = dcp.FileSystemReader(folder).read_metadata()
    sources = [_source(folder, about, name, tensors.get(name)) for name in names]
    return [each for each in sources if each is not None] if None not in sources else None


def _source(folder: Path, about: Metadata, name: str, tensor: Tensor | None) -> Source | None:
    entry = about.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        raise BadData(f"{folder} is no checkpoint of this model (it lacks {name}); name another run")
    if tensor is not None and entry.size != tensor.shape:
        shapes = f"{name} is {list(entry.size)} and not {list(tensor.shape)}"
        raise BadData(f"{folder} is no checkpoint of this model ({shapes}); name another run")
    stored = [_rows(folder, about, name, entry, chunk) for chunk in entry.chunks]
    if None in stored:
        return None
    rows, _ = matrix_shape(entry.size)
    return Source(name, [Run(0, 0, rows, 0, 1)], [[each for chunk in stored for each in chunk or ()]])


def _rows(
    folder: Path, about: Metadata, name: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata
) -> list[StoredRows] | None:
    place = about.storage_data[MetadataIndex(name, chunk.offsets)]
    dtype = entry.properties.dtype
    wrapper = container(tuple(chunk.sizes), dtype)
    num_bytes = chunk.sizes.numel() * dtype.itemsize
    if getattr(place, "transform_descriptors", None):
        return None
    if place.length != len(wrapper.head) + num_bytes + len(wrapper.tail):
        return None
    at = place.offset + len(wrapper.head)
    return box_rows(entry.size, chunk.offsets, chunk.sizes, str(folder / place.relative_path), at, dtype)
