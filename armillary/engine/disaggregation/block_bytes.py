"""KV blocks of an engine as raw bytes, and what two engines must have in common to exchange them."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.runner.device_state import DeviceRows
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
    """Reads and writes blocks between two steps, in the engine's thread. A block is its layers one after the other."""

    def __init__(self, rows: DeviceRows, cache: KVCache) -> None:
        self._rows, self._cache = rows, cache
        self._free: list[torch.Tensor] = []  # host memory of payloads that were sent; any thread adds to it

    def block_bytes(self, heads: range | None = None) -> int:
        """Of these heads of a block, none: all that this rank has."""
        blocks = self._part(heads)
        return int(blocks[:, 0].numel() * blocks.element_size())

    def whole_bytes(self, kv_heads: int, ranks: int) -> int:
        """Of a block with the heads of all ranks."""
        return self.block_bytes() * min(kv_heads, ranks)

    def _part(self, heads: range | None) -> torch.Tensor:
        """A view of the blocks [L, block, 2, head, token, dim]; latents [L, block, token, dim] have no heads."""
        blocks = self._rows.blocks
        return blocks if heads is None or blocks.dim() == 4 else blocks[:, :, :, heads.start : heads.stop]

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
        own_LC, size = self._part(heads), len(blocks) * self.block_bytes(heads)
        slot, memory = shared or (None, self._host_memory(size))
        host_CL = memory[:size].view(own_LC.dtype).view(len(blocks), own_LC.shape[0], *own_LC.shape[2:])
        if not own_LC.is_cuda:
            for copied_L, block in zip(host_CL, blocks, strict=True):
                copied_L.copy_(own_LC[:, block])
            return Payload(memory, size, self._free if slot is None else None, None, slot)
        host_CL.copy_(own_LC[:, self._index(blocks)].transpose(0, 1).contiguous(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Payload(memory, size, self._free, copied)

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
            self._rows.copy_blocks(np.array(copies, dtype=np.int32).reshape(2, -1))

    def write(self, blocks: list[int], data: memoryview, chosen: list[int], heads: range | None = None) -> None:
        """Write these heads of the blocks at places `chosen` of `data`."""
        own_LC = self._part(heads)
        if not blocks:
            return
        given_CL = torch.frombuffer(data, dtype=torch.uint8).view(own_LC.dtype)
        given_CL = given_CL.view(-1, own_LC.shape[0], *own_LC.shape[2:])
        if not own_LC.is_cuda:
            for block, place in zip(blocks, chosen, strict=True):
                own_LC[:, block].copy_(given_CL[place])
            return
        if len(chosen) < len(given_CL):
            given_CL = given_CL[torch.tensor(chosen)]
        own_LC[:, self._index(blocks)] = given_CL.to(own_LC.device).transpose(0, 1)

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
        return f"{blocks.shape[0]} {each} {blocks.dtype} {self._cache.block_tokens} {groups} {by_ranks}"


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
