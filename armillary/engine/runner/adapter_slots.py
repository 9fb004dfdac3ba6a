"""LoRA adapters on the device: a fixed number of slots per projection, and the adapters of a step's rows.

Each rank of tensor parallelism has its shard of them: rows of B where outputs are sharded, columns of A where inputs
are. The sum over ranks of the base projection then adds up the adapters, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.engine.runner.sharded_weights import qkv_rows
from armillary.kernels.lora.grouped_lora import LoraRows, lora_rows
from armillary.model.weights.adapter_folder import Adapter, AdapterMatrices, adapter_shapes
from armillary.parallel.collectives import Group
from armillary.spec.model import ModelConfig

# T rows of a step, S slots, r rank, P parts of a projection, R = P·r, K inputs, N outputs of this rank


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """Of one projection."""

    a_SRK: Tensor
    b_SNr: Tensor
    part_N: Tensor
    rows: Tensor | None  # of B that this rank has; none: all
    columns: slice  # of A

    def put(self, slot: int, adapter: AdapterMatrices | None) -> None:
        if adapter is None:
            self.a_SRK[slot].zero_()
            self.b_SNr[slot].zero_()
            return
        b_Nr = adapter.b_Nr if self.rows is None else adapter.b_Nr[self.rows]
        self.a_SRK[slot].copy_(adapter.a_RK[:, self.columns])
        self.b_SNr[slot].copy_(b_Nr)


class AdapterSlots:
    """Adapters by slot, for every layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        rank: int,
        on: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        self.num_slots, self.rank, self.on = slots, rank, on
        self.device = device
        self.rows: LoraRows | None = None
        """of the step, or of those of its tokens that the last layer computes; none: no row has an adapter"""
        self.modules: dict[tuple[int, str], _Slots] = {}
        for shape in adapter_shapes(config, on):
            _, number, module = shape.name.split(".", 2)
            rows, columns = _shard(module, shape.outputs, shape.inputs, config, group)
            part_N = shape.part_N if rows is None else shape.part_N[rows]
            width = len(shape.heights) * rank
            self.modules[int(number), module] = _Slots(
                a_SRK=_zeros((slots, width, columns.stop - columns.start), dtype, device),
                b_SNr=_zeros((slots, len(part_N), rank), dtype, device),
                part_N=part_N.to(device),
                rows=rows,
                columns=columns,
            )

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """Write an adapter into a slot; none: an adapter that changes nothing."""
        with torch.inference_mode():
            for (number, module), slots in self.modules.items():
                name = f"blocks.{number}.{module}"
                slots.put(slot, None if adapter is None else adapter.modules.get(name))

    def use(self, slots_T: Tensor | None) -> None:
        """The slots of a step's rows, -1 for none; None: no row of the step has an adapter."""
        self.rows = None if slots_T is None else lora_rows(slots_T, self.num_slots)

    def select(self, selected: Tensor) -> None:
        """From here on only some of the step's rows."""
        if self.rows is not None:
            self.rows = lora_rows(self.rows.slots_T.index_select(0, selected), self.num_slots)

    def weights(self, layer: int, module: str) -> tuple[Tensor, Tensor, Tensor] | None:
        """(A, B, part of each column) of a projection; None where the step, or the projection, has no adapters."""
        slots = self.modules.get((layer, module))
        return None if self.rows is None or slots is None else (slots.a_SRK, slots.b_SNr, slots.part_N)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Written at once, so that the memory counts as used when the KV cache is planned."""
    return torch.empty(shape, dtype=dtype, device=device).zero_()


def _shard(
    module: str, outputs: int, inputs: int, config: ModelConfig, group: Group | None
) -> tuple[Tensor | None, slice]:
    """(rows of B, columns of A) of this rank."""
    if group is None:
        return None, slice(0, inputs)
    if module == "attention.qkv":
        return torch.cat([torch.arange(begin, end) for begin, end in qkv_rows(config, group)]), slice(0, inputs)
    if module == "mlp.up":
        share = outputs // group.size
        return torch.arange(group.rank * share, (group.rank + 1) * share), slice(0, inputs)
    share = inputs // group.size
    return None, slice(group.rank * share, (group.rank + 1) * share)
