"""The weights of one tensor-parallel rank of the engine, read from a folder without the rest of the model."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from armillary.engine.runner.rank_layout import Experts, RankLayout
from armillary.errors import BadLayout
from armillary.model.device import refuse_too_big
from armillary.model.quantized.packed_linear import PackedLinear
from armillary.model.quantized.packed_rows import FusedRows
from armillary.model.quantized.quantization_config import packed_reader
from armillary.model.transformer import Progress, Transformer
from armillary.model.weights.hf_weights import full_names, load_model
from armillary.model.weights.row_map import matrix_shape
from armillary.parallel.collectives import Group
from armillary.parallel.consensus import Consensus
from armillary.parallel.loading.model_folder import load_folder
from armillary.parallel.loading.read_plan import Need, Span, box_need, shard_box
from armillary.parallel.shard_weights import materialise
from armillary.spec.model import ModelConfig
from armillary.store.hf_folder import gguf_file, read_config

_SHARDED = {
    "attention.out.weight": 1,
    "attention.conv_CW": 0,
    "attention.log_rate_V": 0,
    "attention.rate_bias_V": 0,
    "attention.q.weight": 0,
    "attention.kv_up.weight": 0,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
    "mlp.shared.up.weight": 0,
    "mlp.shared.down.weight": 1,
}
"""the dim that is sharded, by the end of a weight's name; others are replicated, but for QKV, experts and the head"""
_OF_EXPERTS = {
    "experts.up_E2FH": 1,
    "experts.down_EHF": 2,
    "experts.up_bias_E2F": 1,
    "experts.down_bias_EH": None,
}
"""the dim that is sharded over the ranks of an expert; the first is that of the experts"""


def load_shard(
    folder: Path | str,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ranks: RankLayout,
    machines: Sequence[str],
    progress: Progress | None = None,
) -> Transformer:
    """A model, or the stage of it, whose weights are this rank's shards, for `tensor_parallel.shard`; all ranks call
    this together. Quantized weights stay packed: each rank reads all of them, one at a time, and keeps its part."""
    if is_quantized(Path(folder)):
        shard = RankShard(config, ranks)
        return load_model(folder, dtype=dtype, device=device, packed=True, shard=shard, progress=progress)
    with torch.device("meta"):
        full, model = stage_of(config, ranks).to(dtype), stage_of(config, ranks).to(dtype)
    copies_head = config.tied and model.embedding is None and model.output is not None
    needs = {}
    for name, tensor in full_names(full).items():
        own = "output.weight" if copies_head and name == "embedding.weight" else name
        shape, needs[name] = local_part(own, tensor.shape, config, ranks.tp, ranks.experts)
        if isinstance(tensor, nn.Parameter):
            module, _, last = own.rpartition(".")
            empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
            setattr(model.get_submodule(module), last, nn.Parameter(empty, requires_grad=False))
    refuse_too_big(config.name, sum(tensor.nbytes for tensor in full_names(model).values()), device)
    materialise(model, device)
    targets = {name: tensor.detach() for name, tensor in full_names(model).items()}
    everyone = Consensus(rank=ranks.world.rank, size=ranks.world.size)
    load_folder(full, folder, targets, needs, ranks=everyone, machines=machines, progress=progress)
    return model


def stage_of(config: ModelConfig, ranks: RankLayout) -> Transformer:
    """The layers of this rank, with embedding and head where they belong to its stage."""
    pipeline = ranks.pipeline
    if pipeline is None:
        return Transformer(config)
    return Transformer(config, layers=ranks.layers(config), first=pipeline.is_first, last=pipeline.is_last)


class RankShard:
    """A rank's part of every weight, plain or packed."""

    def __init__(self, config: ModelConfig, ranks: RankLayout) -> None:
        self._config, self._ranks, self._group = config, ranks, ranks.tp
        if ranks.pipeline is not None and config.tied:
            raise BadLayout(
                f"{config.name} is quantized and shares one matrix between embedding and head, which stages do not; "
                "use --set serve.pp=1"
            )

    def model(self, config: ModelConfig) -> Transformer:
        return stage_of(config, self._ranks)

    def experts(self, num_experts: int) -> range:
        return self._ranks.experts.own(num_experts)

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        return local_part(name, shape, self._config, self._group, self._ranks.experts)[0]

    def tensor(self, name: str, full: Tensor) -> Tensor:
        shape, need = local_part(name, full.shape, self._config, self._group, self._ranks.experts)
        matrix = full.reshape(matrix_shape(full.shape))
        return matrix[_numbers(need.rows)][:, slice(*need.columns)].reshape(shape)

    def rows(self, name: str, full: FusedRows) -> FusedRows:
        """Of a matrix, or of one expert of a layer's; a packed head stays whole."""
        if name == "output.weight":
            return full
        size = sum(part.num_rows for part in full.parts), full.parts[0].columns
        if name.endswith(_EXPERTS):
            dim, own = (_OF_EXPERTS[name.rpartition("mlp.")[2]] or 1) - 1, self._ranks.experts
            offsets, sizes = shard_box(size, [(dim, own.tp, own.tp_rank)])
            need = box_need(size, offsets, sizes)
        else:
            _, need = local_part(name, size, self._config, self._group)
        columns = full if need.columns == Span(0, size[1]) else full.select_columns(*need.columns)
        return columns if need.rows == (Span(0, size[0]),) else columns.select(_numbers(need.rows))


_EXPERTS = ("experts.up_E2FH", "experts.down_EHF")


def _numbers(spans: Sequence[Span]) -> Tensor:
    return torch.cat([torch.arange(span.begin, span.end) for span in spans])


def is_quantized(folder: Path) -> bool:
    return gguf_file(folder) is not None or packed_reader(read_config(folder)) is not None


def is_sharded(model: Transformer) -> bool:
    """Whether `load_shard` made it; packed weights are divided only there."""
    out = next(iter(model.blocks.values())).attention.out  # type: ignore[union-attr]
    return isinstance(out, PackedLinear) or bool(out.weight.shape[1] != out.in_features)


def local_part(
    name: str, shape: Sequence[int], config: ModelConfig, group: Group, experts: Experts | None = None
) -> tuple[tuple[int, ...], Need]:
    """(shape, what it holds) of a rank's part of a weight."""
    of_experts = next((end for end in _OF_EXPERTS if name.endswith(end)), None)
    if of_experts is not None:
        experts = experts or Experts(tp=group.size, tp_rank=group.rank)
        dim = _OF_EXPERTS[of_experts]
        within = [] if dim is None else [(dim, experts.tp, experts.tp_rank)]
        offsets, sizes = shard_box(shape, [(0, experts.parts, experts.part), *within])
        return sizes, box_need(shape, offsets, sizes)
    if ".attention.qkv." in name and config.layers[int(name.split(".")[1])].attention == "gated_delta":
        offsets, sizes = shard_box(shape, [(0, group.size, group.rank)])
        return sizes, box_need(shape, offsets, sizes)
    if ".attention.qkv." in name:
        in_pairs = config.layers[int(name.split(".")[1])].attention == "2-simplicial"
        need = Need(qkv_rows(config, group, in_pairs=in_pairs), Span(0, matrix_shape(shape)[1]))
        return (sum(span.size for span in need.rows), *shape[1:]), need
    dim = 0 if name == "output.weight" else next((dim for end, dim in _SHARDED.items() if name.endswith(end)), None)
    offsets, sizes = shard_box(shape, [] if dim is None else [(dim, group.size, group.rank)])
    return sizes, box_need(shape, offsets, sizes)


def qkv_rows(config: ModelConfig, group: Group, *, in_pairs: bool = False) -> tuple[Span, ...]:
    """Full groups of [q…, k, v], or with two keys and values `in_pairs`, with their gates, where there are some; where
    ranks share a KV head, its queries and gates are sharded and its key and value replicated."""
    members, dim = config.heads // config.kv_heads, config.head_dim
    gates = members * dim * config.attention_gate
    height = (members + (4 if in_pairs else 2)) * dim + gates
    if config.kv_heads >= group.size:
        local = config.kv_heads // group.size * height
        return (Span(group.rank * local, (group.rank + 1) * local),)
    head, part = divmod(group.rank, group.size // config.kv_heads)
    queries = members // (group.size // config.kv_heads) * dim
    begin = head * height
    own = Span(begin + part * queries, begin + (part + 1) * queries)
    key_and_value = Span(begin + members * dim, begin + height - gates)
    if not gates:
        return own, key_and_value
    first = key_and_value.end + part * queries
    return own, key_and_value, Span(first, first + queries)
