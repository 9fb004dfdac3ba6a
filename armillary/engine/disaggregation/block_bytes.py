"""KV blocks of an engine as raw bytes, and what two engines must have in common to exchange them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.runner.device_state import DeviceRows
from armillary.engine.scheduler.decision import as_one
from armillary.spec.model import ModelConfig

Payload = Callable[[], memoryview]
"""waits until the copy from the device is complete"""
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_WEIGHT_FILES = (".safetensors", ".gguf", ".bin")

# C blocks, L layers of a group


class BlockBytes:
    """Reads and writes blocks between two steps, in the engine's thread. A block is its layers one after the other."""

    def __init__(self, rows: DeviceRows, cache: KVCache) -> None:
        self._rows, self._cache = rows, cache

    @property
    def block_bytes(self) -> int:
        blocks = self._rows.blocks
        return int(blocks[:, 0].numel() * blocks.element_size())

    def read(self, blocks: list[int]) -> Payload:
        """Start to copy blocks; on a GPU the copy runs beside the next step. On a CPU one block is copied after the
        other: its heads are apart in memory, and an index over blocks copies them at a twentieth of the speed."""
        own_LC = self._rows.blocks
        if not own_LC.is_cuda:
            own_CL = torch.empty((len(blocks), own_LC.shape[0], *own_LC.shape[2:]), dtype=own_LC.dtype)
            for copied_L, block in zip(own_CL, blocks, strict=True):
                copied_L.copy_(own_LC[:, block])
            return lambda: memoryview(own_CL.flatten().view(torch.uint8).numpy())
        bytes_C = own_LC[:, self._index(blocks)].transpose(0, 1).contiguous().flatten().view(torch.uint8)
        pinned, done = torch.empty(bytes_C.shape, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
        pinned.copy_(bytes_C, non_blocking=True)
        done.record()

        def wait() -> memoryview:
            done.synchronize()
            return memoryview(pinned.numpy())

        return wait

    def write(self, blocks: list[int], data: memoryview, chosen: list[int]) -> None:
        """Write the blocks at places `chosen` of `data`. Copies that are decided and not done yet come first: they may
        read what is overwritten here."""
        copies, own_LC = self._cache.copies, self._rows.blocks
        if copies:
            self._rows.copy_blocks(np.array(as_one(copies), dtype=np.int32).reshape(-1, 2).T.copy())
            copies.clear()
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

    def layout(self) -> str:
        shape = self._rows.blocks.shape
        groups = [(group.sees, group.reach, group.layers) for group in self._cache.groups]
        return f"{shape[0]} {tuple(shape[2:])} {self._rows.blocks.dtype} {self._cache.block_tokens} {groups}"


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
