"""A model whose folder holds packed weights, loaded as they are: nothing is dequantised that was not stored so.

Each of our fused matrices is joined from the rows of the packed ones (`quantized.packed_rows`), by the same rules as
plain weights; modules become `PackedLinear` and `PackedExperts`.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from armillary.errors import BadModel
from armillary.kernels.core.dtype import HF_NAMES
from armillary.model.device import refuse_too_big
from armillary.model.moe.experts import Router
from armillary.model.moe.packed_experts import PackedExperts
from armillary.model.quantized.mxfp4_experts import blocks_name, read_experts
from armillary.model.quantized.packed_linear import PackedEmbedding, PackedLinear
from armillary.model.quantized.packed_rows import FusedRows, PackedRows, join_rows, plain
from armillary.model.quantized.quantization_config import ReadModule
from armillary.model.quantized.stored import Stored
from armillary.model.transformer import Progress, Transformer
from armillary.model.weights.fused_rows import interleave
from armillary.model.weights.hf_layout import Rule, is_of_mtp_layer, rules, tensor_names
from armillary.model.weights.kv_ranges import SCALES
from armillary.spec.arithmetic.params import parameters
from armillary.spec.model import ModelConfig
from armillary.units import bytes_text, count_text

_EXPERTS = (".experts.up_E2FH", ".experts.down_EHF")
_NOT_ONE_MODEL = "config.json and weights are not of one model"
_UNUSED = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    ".output_scale",
    *SCALES,
)


_DEQUANTISED = "attention.kv_up.weight"
"""multiplied with queries and results of attention rather than with hidden states"""


Keep = Literal[True, False, "dense"]
"""which weights stay packed: all, none, or those of the dense linear layers of blocks"""


class Shard(Protocol):
    """A rank's part of every weight, by its name."""

    def model(self, config: ModelConfig) -> Transformer: ...
    def experts(self, num_experts: int) -> range: ...
    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]: ...
    def tensor(self, name: str, full: Tensor) -> Tensor: ...
    def rows(self, name: str, full: FusedRows) -> FusedRows: ...


class _Whole:
    """All of them."""

    def model(self, config: ModelConfig) -> Transformer:
        return Transformer(config)

    def experts(self, num_experts: int) -> range:
        return range(num_experts)

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def tensor(self, name: str, full: Tensor) -> Tensor:
        return full

    def rows(self, name: str, full: FusedRows) -> FusedRows:
        return full


WHOLE: Shard = _Whole()


class Tensors(Protocol):
    """A `TensorFolder`, or another store of tensors under Hugging Face names."""

    def __contains__(self, name: str) -> bool: ...
    def names(self) -> Iterator[str]: ...
    def is_plain(self, name: str) -> bool: ...
    def total_bytes(self) -> int: ...
    def read_any(self, name: str) -> Tensor: ...


class PackedFolder:
    """The tensors of a folder by the rules of its model, or of a `part` of it that has `part_rules`; some of them
    packed."""

    def __init__(
        self,
        config: ModelConfig,
        stored: Tensors,
        read_module: ReadModule,
        part: nn.Module | None = None,
        part_rules: list[Rule] | None = None,
    ) -> None:
        _refuse_more_weights_than_bits(config, stored.total_bytes())
        self.config, self.folder, self._read_module = config, stored, read_module
        self.stored = Stored(has=stored.__contains__, read=stored.read_any)
        with torch.device("meta"):
            self.shapes = {name: tensor.shape for name, tensor in _tensors(part or Transformer(config)).items()}
        self.rules = part_rules or rules(config)
        self._others: set[str] = set()

    def is_stack(self, rule: Rule) -> bool:
        """Whether it is the packed experts of a layer, all in one tensor."""
        if not rule.transposed or blocks_name(rule.hf_names[0]) not in self.folder:
            return False
        return tensor_names(self.config).alternating  # gate and up rows of packed stacks do

    def is_packed(self, rule: Rule) -> bool:
        return self.is_stack(rule) or any(
            not self.folder.is_plain(name) and name.endswith(".weight") for name in rule.hf_names
        )

    def plain(self, rule: Rule) -> Tensor:
        """The joined tensor of a rule that is stored plain."""
        parts = []
        for name in rule.hf_names:
            if name not in self.folder:
                raise BadModel(f"{self.config.name}: tensor {name} is missing; {_NOT_ONE_MODEL}")
            parts.append(self.stored.get(name, *HF_NAMES))
        self._check(rule, [tuple(part.shape) for part in parts])
        return rule.join(parts)

    def packed(self, rule: Rule) -> list[PackedRows]:
        """The matrices that a rule joins, those stored plain too; of a stack, those of each expert."""
        if self.is_stack(rule):
            return read_experts(self.stored, rule.hf_names[0], tuple(self.shapes[rule.name]))  # type: ignore[arg-type]
        wanted = [tuple(part.shape) for part in rule.split(torch.empty(self.shapes[rule.name], device="meta"))]
        parts = []
        for name, shape in zip(rule.hf_names, wanted, strict=True):
            if len(shape) != 2 or shape[1] % 2:
                raise BadModel(f"{self.config.name}: {name} of shape {list(shape)} cannot be packed; take plain ones")
            parts.append(self._read_module(self.stored, name.removesuffix(".weight"), shape) or self._plain_part(name))
        return parts

    def dequantised(self, rule: Rule) -> Tensor:
        """The joined tensor of a rule that is stored packed."""
        parts = [part.dequantised() for part in self.packed(rule)]
        return torch.stack(parts) if self.is_stack(rule) else rule.join(parts)

    def _plain_part(self, name: str) -> PackedRows:
        if not self.folder.is_plain(name):
            raise BadModel(f"{self.config.name}: {name} is not stored as quantization_config says; {_NOT_ONE_MODEL}")
        return plain(self.stored.get(name, *HF_NAMES))

    def _check(self, rule: Rule, shapes: Sequence[tuple[int, ...]]) -> None:
        shape = rule.joined_shape([torch.Size(each) for each in shapes])
        if shape != self.shapes[rule.name]:
            actual = list(shape) if shape is not None else [list(each) for each in shapes[:3]]
            raise BadModel(
                f"{self.config.name}: {rule.hf_names[0]} makes {actual} where config.json says "
                f"{list(self.shapes[rule.name])}; {_NOT_ONE_MODEL}"
            )

    def skip(self, rule: Rule) -> None:
        """Its tensors are another rank's."""
        self._others.update(name.removesuffix(".weight") for name in rule.hf_names)

    def _is_anothers(self, name: str) -> bool:
        return any(each in self._others for each in (name, name.rpartition(".")[0], name.rpartition("_")[0]))

    def refuse_extra(self) -> None:
        """BadModel where tensors are left over. Biases of zeros are none: some tools write them for every layer."""
        for name in sorted(set(self.folder.names()) - self.stored.used):
            unused = name.endswith(_UNUSED) or (self.config.tied and name == "lm_head.weight")
            unused = unused or self._is_anothers(name)
            unused = unused or is_of_mtp_layer(name, self.config, self.stored.has)
            if not unused and not (name.endswith(".bias") and not self.stored.get(name).any()):
                raise BadModel(
                    f"{self.config.name}: tensor {name} is not part of a {self.config.family} model of this shape; "
                    f"{_NOT_ONE_MODEL}"
                )


@torch.no_grad()
def load_packed(
    folder: PackedFolder,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    keep: Keep,
    progress: Progress | None = None,
    shard: Shard = WHOLE,
) -> Transformer:
    """The model with those packed weights that `keep` says; the others are dequantised to `dtype`. Of each weight only
    the `shard` stays; one weight at a time is in memory as a whole."""
    packed = {rule.name for rule in folder.rules if folder.is_packed(rule)}
    still_packed = {name for name in packed if _stays(name, keep)}
    if shard is WHOLE:
        refuse_too_big(folder.config.name, folder.folder.total_bytes(), torch.device(device))
    model = _empty(folder.config, still_packed, dtype, torch.device(device), shard)
    tensors = _tensors(model)
    experts: dict[str, list[FusedRows]] = {}
    for i, rule in enumerate(folder.rules):
        if rule.name not in tensors:  # of another stage
            folder.skip(rule)
        elif rule.name not in packed:
            tensors[rule.name].copy_(shard.tensor(rule.name, folder.plain(rule)))
        elif rule.name not in still_packed:
            tensors[rule.name].copy_(shard.tensor(rule.name, folder.dequantised(rule)))
        elif rule.name == "embedding.weight":
            (weight,) = folder.packed(rule)
            model.embedding = PackedEmbedding(weight.to(torch.device(device)), dtype)  # type: ignore[assignment]
        elif rule.name.endswith(_EXPERTS):
            parts = _per_expert(folder, rule)
            experts[rule.name] = [shard.rows(rule.name, parts[e]) for e in shard.experts(len(parts))]
        else:
            _set_linear(model, rule.name, shard.rows(rule.name, join_rows(rule.join, folder.packed(rule))))
        if progress:
            progress(i + 1, len(folder.rules))
    for path in sorted({name.rpartition(".")[0] for name in experts}):
        _set_experts(model, path, experts)
    folder.refuse_extra()
    return model


def _refuse_more_weights_than_bits(config: ModelConfig, num_bytes: int) -> None:
    """Before memory is taken for what config.json says."""
    count = parameters(config).total
    if count > 8 * num_bytes:
        raise BadModel(
            f"{config.name}: config.json says {count_text(count)} parameters, for which {bytes_text(num_bytes)} of "
            f"weights are too few; {_NOT_ONE_MODEL}"
        )


def _stays(name: str, keep: Keep) -> bool:
    if not keep or name.endswith(_DEQUANTISED):
        return False
    return keep is True or (name.startswith("blocks.") and not name.endswith(_EXPERTS))


def _empty(
    config: ModelConfig, packed: set[str], dtype: torch.dtype, device: torch.device, shard: Shard
) -> Transformer:
    """A model with memory for all but its packed weights."""
    with torch.device("meta"):
        model = shard.model(config)
        packed = packed & set(_tensors(model))
        for name, tensor in [] if shard is WHOLE else list(model.named_parameters()):
            module, _, last = name.rpartition(".")
            empty = torch.empty(shard.shape(name, tensor.shape))
            setattr(model.get_submodule(module), last, nn.Parameter(empty, requires_grad=False))
        for name in packed:
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, nn.Parameter(torch.empty(0), requires_grad=False))
    model = model.to(dtype)
    refuse_too_big(config.name, sum(tensor.nbytes for tensor in model.parameters()), device)
    model = model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _set_linear(model: Transformer, name: str, weight: FusedRows) -> None:
    path, _, last = name.removesuffix(".weight").rpartition(".")
    parent = model.get_submodule(path)
    linear = getattr(parent, last)
    bias = linear.bias.detach() if isinstance(linear, nn.Linear) and linear.bias is not None else None
    setattr(parent, last, PackedLinear(_on(weight, linear.weight.device), bias))


def _per_expert(folder: PackedFolder, rule: Rule) -> list[FusedRows]:
    parts = folder.packed(rule)
    if rule.name.endswith(".down_EHF") or folder.is_stack(rule):
        return [FusedRows(parts=(part,)) for part in parts]
    gate_ups = zip(parts[0::2], parts[1::2], strict=True)
    return [join_rows(lambda both: interleave(*both), gate_up) for gate_up in gate_ups]


def _set_experts(model: Transformer, path: str, joined: dict[str, list[FusedRows]]) -> None:
    names = f"{path}.up_E2FH", f"{path}.down_EHF"
    if not all(name in joined for name in names):
        raise BadModel(f"{model.config.name}: experts are packed in part; take weights of one format")
    mixture, experts = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
    device, biases = next(model.parameters()).device, (experts.up_bias_E2F, experts.down_bias_EH)
    up, down = (
        [PackedLinear(_on(each, device), _of_expert(bias, e)) for e, each in enumerate(joined[name])]
        for name, bias in zip(names, biases, strict=True)
    )
    mixture.experts = PackedExperts(experts, up, down)  # type: ignore[arg-type]


def _of_expert(bias_EN: Tensor | None, expert: int) -> Tensor | None:
    return None if bias_EN is None else bias_EN.detach()[expert]


def _on(weight: FusedRows, device: torch.device) -> FusedRows:
    order = None if weight.order_N is None else weight.order_N.to(device)
    return FusedRows(parts=tuple(part.to(device) for part in weight.parts), order_N=order)
