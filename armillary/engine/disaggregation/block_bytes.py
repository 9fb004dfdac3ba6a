"""KV blocks of an engine as raw bytes, and what two engines must have in common to exchange them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.disaggregation.stage_slots import StageSlots, stage_slots
from armillary.engine.runner.device_state import DeviceRows
from armillary.engine.runner.draft_head import DraftHead
from armillary.engine.runner.draft_model import DraftModel
from armillary.engine.scheduler.decision import as_one
from armillary.spec.model import ModelConfig

_SAMPLES, _SAMPLE_BYTES = 256, 4096
_WEIGHT_FILES = (".safetensors", ".gguf", ".bin")

# C blocks, L layers of a group


class Payload:
    """Blocks copied to host memory, or on their way there."""

    def __init__(
        self,
        memory: torch.Tensor,
        size: int,
        free: list[torch.Tensor] | None,
        copied: torch.cuda.Event | None,
        slot: int | None = None,
    ) -> None:
        """`slot`: of shared memory, which the other side gives back; else it goes to `free`."""
        self._memory, self._size, self._free, self._copied, self.slot = memory, size, free, copied, slot

    def data(self) -> memoryview:
        """Waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return memoryview(self._memory.numpy())[: self._size]

    def release(self) -> None:
        """They were sent: others may use the memory. To get new memory takes as long as to fill it."""
        if self._free is not None:
            self._free.append(self._memory)


class BlockBytes:
    """Reads and writes blocks between two steps, in the engine's thread. A block is its layers one after the other, and
    where a draft head reads them the hidden states of its tokens. Keys and values of the draft itself are not sent: it
    computes a sequence from its beginning when it first drafts for it."""

    def __init__(self, rows: DeviceRows, cache: KVCache, draft: DraftModel | None = None) -> None:
        self._rows, self._cache, self._draft = rows, cache, draft
        self._hidden = draft.hidden.rows if isinstance(draft, DraftHead) else None
        self._free: list[torch.Tensor] = []  # host memory of payloads that were sent; any thread adds to it

    def block_bytes(self, heads: range | None = None, stage: StageSlots | None = None) -> int:
        """Of these heads of a block, none: all that this rank has; of a `stage` of the other side, its layers."""
        return sum(map(_bytes_of, self._parts(heads, stage)))

    def whole_bytes(self, kv_heads: int, tp: int, stages: int = 1) -> int:
        """Of a block with the heads of all `tp` ranks and the layers of all stages."""
        own, *hidden = map(_bytes_of, self._parts(None))
        slots = sum(stage.num_slots for stage in stage_slots(self._cache.groups, stages))
        return own // len(self._rows.blocks) * slots * min(kv_heads, tp) + sum(hidden)

    def stages(self, stages: int) -> list[StageSlots | None]:
        """The layers of each stage of the other side; None: all."""
        return list(stage_slots(self._cache.groups, stages)) if stages > 1 else [None]

    def _parts(self, heads: range | None, stage: StageSlots | None = None) -> list[torch.Tensor]:
        """Views of the blocks [L, block, 2, head, token, dim], latents [L, block, token, dim], which have no heads, and
        hidden states [1, block, token, dim]. Of a stage of the other side as many layers as a block has there,
        whichever they are."""
        blocks = self._rows.blocks if stage is None else self._rows.blocks[: stage.num_slots]
        own = blocks if heads is None or blocks.dim() == 4 else blocks[:, :, :, heads.start : heads.stop]
        return [own] if self._hidden is None else [own, self._hidden.blocks]

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def in_host_memory(self) -> bool:
        """Blocks are copied by the CPU."""
        return not self._rows.blocks.is_cuda

    def read(
        self, blocks: list[int], shared: tuple[int, torch.Tensor] | None = None, heads: range | None = None
    ) -> Payload:
        """Start to copy blocks, or these heads of them, into a slot of `shared` memory where there is one; on a GPU the
        copy runs beside the next step. On a CPU one block is copied after the other: its heads are apart in memory, and
        an index over blocks copies them at a twentieth of the speed."""
        size = len(blocks) * self.block_bytes(heads)
        slot, memory = shared or (None, self._host_memory(size))
        for own_LC, host_CL in self._sections(memory[:size], heads, len(blocks)):
            if own_LC.is_cuda:
                host_CL.copy_(own_LC[:, self._index(blocks)].transpose(0, 1).contiguous(), non_blocking=True)
                continue
            for copied_L, block in zip(host_CL, blocks, strict=True):
                copied_L.copy_(own_LC[:, block])
        if self.in_host_memory:
            return Payload(memory, size, self._free if slot is None else None, None, slot)
        copied = torch.cuda.Event()
        copied.record()
        return Payload(memory, size, self._free, copied)

    def _sections(
        self, data: torch.Tensor, heads: range | None, count: int, stage: StageSlots | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(own blocks, where so many of them are in bytes [C, L, …]), part by part."""
        at = 0
        for own_LC in self._parts(heads, stage):
            end = at + count * _bytes_of(own_LC)
            yield own_LC, data[at:end].view(own_LC.dtype).view(count, own_LC.shape[0], *own_LC.shape[2:])
            at = end

    def _host_memory(self, size: int) -> torch.Tensor:
        while self._free:
            memory = self._free.pop()
            if len(memory) >= size:
                return memory
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._rows.blocks.is_cuda)

    def decided_copies(self) -> list[int]:
        """Sources and targets of copies that the scheduler has decided and no step has done; they are the caller's."""
        copies = self._cache.copies
        decided = np.array(as_one(copies), dtype=np.int32).reshape(-1, 2).T.ravel().tolist() if copies else []
        copies.clear()
        return decided

    def copy(self, copies: list[int]) -> None:
        """Do `decided_copies`, before anything overwrites what they read."""
        if copies:
            numbers = np.array(copies, dtype=np.int32).reshape(2, -1)
            self._rows.copy_blocks(numbers)
            if self._draft is not None:
                self._draft.copy_blocks(numbers)

    def write(
        self,
        blocks: list[int],
        data: memoryview,
        chosen: list[int],
        heads: range | None = None,
        stage: StageSlots | None = None,
        groups: list[int] | None = None,
    ) -> None:
        """Write these heads of the blocks at places `chosen` of `data`; of a `stage` of the other side its layers,
        where the `groups` of the blocks have them."""
        if not blocks:
            return
        if stage is not None:
            assert groups is not None
            return self._write_stage(list(zip(blocks, chosen, groups, strict=True)), data, heads, stage)
        count = len(data) // self.block_bytes(heads)
        for own_LC, given_CL in self._sections(torch.frombuffer(data, dtype=torch.uint8), heads, count):
            if own_LC.is_cuda:
                wanted_CL = given_CL[torch.tensor(chosen)] if len(chosen) < count else given_CL
                own_LC[:, self._index(blocks)] = wanted_CL.to(own_LC.device).transpose(0, 1)
                continue
            for block, place in zip(blocks, chosen, strict=True):
                own_LC[:, block].copy_(given_CL[place])

    def _write_stage(
        self, places: list[tuple[int, int, int]], data: memoryview, heads: range | None, stage: StageSlots
    ) -> None:
        """(block, place in `data`, group) of each."""
        count = len(data) // self.block_bytes(heads, stage)
        ((_, given_CL),) = self._sections(torch.frombuffer(data, dtype=torch.uint8), heads, count, stage)
        own_LC = self._parts(heads)[0]
        for block, place, group in places:
            slots = stage.by_group[group]
            own_LC[slots.start : slots.stop, block].copy_(given_CL[place, : len(slots)])

    def _index(self, blocks: list[int]) -> torch.Tensor:
        return torch.tensor(blocks, device=self._rows.device)

    def layout(self, config: ModelConfig, ranks: int) -> str:
        """What both sides must share. Their ranks may differ, except where the scales of 8 bits or the second keys of a
        head are divided by them."""
        blocks = self._rows.blocks
        in_heads, in_pairs = blocks.dim() > 4, any(kind.attention == "2-simplicial" for kind in config.layers)
        each = tuple(blocks.shape[4:] if in_heads else blocks.shape[2:])
        groups = [(group.sees, group.reach, group.layers) for group in self._cache.groups]
        by_ranks = ranks if in_heads and (blocks.element_size() == 1 or in_pairs) else "any"
        hidden = "" if self._hidden is None else f" hidden states {self._hidden.blocks.dtype}"
        return f"{each} {blocks.dtype} {self._cache.block_tokens} {groups} {by_ranks}{hidden}"


def _bytes_of(blocks_LC: torch.Tensor) -> int:
    """Of one block."""
    return int(blocks_LC[:, 0].numel() * blocks_LC.element_size())


def fingerprint(config: ModelConfig, folder: Path, weights: str, layout: str) -> bytes:
    """32 bytes that two engines share whose blocks mean the same: configuration, samples of the weights' files, the
    dtype they are computed in, and the layout of a block."""
    digest = sha256(f"{replace(config, name='')!r}\n{weights}\n{layout}\n".encode())
    files = [folder] if folder.is_file() else sorted(x for x in folder.iterdir() if x.suffix in _WEIGHT_FILES)
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as data:
            for sample in range(_SAMPLES):
                data.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.digest()
