"""KV blocks in host memory, and the copies between them and the device's (`cache/kv_offload.py` decides which).

On a GPU the host's blocks are pinned, and everything over the link runs on a stream of its own: a block that a step
needs is loaded while the step before runs, and one that moves to the host is first gathered in device memory, so that
no step waits for it to arrive.
"""

import torch
from torch import Tensor

from armillary.engine.runner.step_input import Ints
from armillary.kernels.paged.paged_attention import untouched_zeros

# C copied blocks, L layers of a group; … is one layer's part of a block


class HostBlocks:
    """Blocks of all layers of a group, one after the other; block 0 is not used."""

    def __init__(self, num_blocks: int, device_blocks: Tensor) -> None:
        """`device_blocks`: [L, block, …]."""
        shape = (num_blocks + 1, device_blocks.shape[0], *device_blocks.shape[2:])
        self.device = device_blocks.device
        self.stream = torch.cuda.Stream(device_blocks.device) if device_blocks.is_cuda else None
        self.blocks: Tensor = (
            untouched_zeros(shape, device_blocks.dtype)
            if self.stream is None
            else torch.empty(shape, dtype=device_blocks.dtype, pin_memory=True)
        )

    def copy(self, blocks: Tensor, copies: Ints) -> None:
        """Sources and targets [2, C], −h for host block h: all are read before any is written."""
        sources, targets = torch.from_numpy(copies).long()
        from_device, to_device = sources > 0, targets > 0
        kept_CL = blocks[:, self._sent(sources[from_device])].transpose(0, 1)
        loaded_CL = self._load(-sources[~from_device]) if not from_device.all() else kept_CL[:0]
        if from_device.all():
            read_CL = kept_CL
        elif not from_device.any():
            read_CL = loaded_CL
        else:
            read_CL = kept_CL.new_empty((len(sources), *kept_CL.shape[1:]))
            read_CL[self._sent(from_device)], read_CL[self._sent(~from_device)] = kept_CL, loaded_CL
        if to_device.any():
            blocks[:, self._sent(targets[to_device])] = read_CL[self._sent(to_device)].transpose(0, 1)
        if not to_device.all():
            self._store(-targets[~to_device], read_CL[self._sent(~to_device)])

    def _load(self, slots: Tensor) -> Tensor:
        if self.stream is None:
            return self.blocks[slots]
        with torch.cuda.stream(self.stream):  # its memory is the stream's too: no step in flight still uses it
            loaded_CL = torch.empty((len(slots), *self.blocks.shape[1:]), dtype=self.blocks.dtype, device=self.device)
            for at, slot in enumerate(slots.tolist()):
                loaded_CL[at].copy_(self.blocks[slot], non_blocking=True)
        main = torch.cuda.current_stream(self.device)
        main.wait_stream(self.stream)
        loaded_CL.record_stream(main)
        return loaded_CL

    def _store(self, slots: Tensor, read_CL: Tensor) -> None:
        if self.stream is None:
            self.blocks[slots] = read_CL
            return
        read_CL = read_CL.contiguous()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for at, slot in enumerate(slots.tolist()):
                self.blocks[slot].copy_(read_CL[at], non_blocking=True)
        read_CL.record_stream(self.stream)

    def _sent(self, index: Tensor) -> Tensor:
        return index if self.stream is None else index.pin_memory().to(self.device, non_blocking=True)
