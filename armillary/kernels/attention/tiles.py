"""Tile sizes of our attention kernels, and whether their tiles can be loaded by TMA.

Measured on an H200 at 8k tokens and head dim 128; the comparisons are in benchmarks/.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.core.launch import first_fitting, power_of_two
from armillary.machine.accelerator import accelerator_of


@dataclass(frozen=True)
class AttentionTiles:
    """Block sizes and launch options of a kernel."""

    queries: int  # per block
    keys: int  # per block
    warps: int
    stages: int  # loads in flight
    shared_kb: int  # most that it compiles to for 8.x and 12.x (tests/kernels/compile_for.py); 9.0 has enough for all
    sm_100_kb: int = 0  # the same for 10.x, where that is more than a block has
    edge_stages: int = 0  # loads in flight where blocks are masked; 0: as elsewhere
    pack: int = 1  # heads of a KV head that are rows of one block


# (kernel, whether it is for fp32) -> largest head dim -> tiles, best first; the later ones are for less shared memory
# and were not timed
_TILES: dict[tuple[str, bool], dict[int, tuple[AttentionTiles, ...]]] = {
    ("forward", False): {
        64: (AttentionTiles(128, 128, 8, 3, 81),),
        128: (AttentionTiles(64, 64, 4, 3, 89), AttentionTiles(64, 64, 4, 2, 57)),
        256: (AttentionTiles(128, 64, 8, 2, 145), AttentionTiles(64, 32, 4, 2, 69)),
    },
    ("forward", True): {
        64: (AttentionTiles(64, 32, 4, 2, 49),),
        128: (AttentionTiles(64, 32, 4, 2, 113), AttentionTiles(64, 32, 4, 1, 81)),
        256: (AttentionTiles(64, 32, 4, 1, 161), AttentionTiles(32, 16, 4, 1, 81)),
    },
    ("key", False): {
        64: (AttentionTiles(64, 128, 8, 2, 49),),
        128: (AttentionTiles(64, 64, 4, 2, 73),),
        256: (AttentionTiles(64, 64, 8, 2, 137, sm_100_kb=258), AttentionTiles(32, 32, 4, 2, 67)),
    },
    ("key", True): {
        64: (AttentionTiles(16, 32, 4, 1, 41),),
        128: (AttentionTiles(16, 32, 4, 1, 81),),
        256: (AttentionTiles(16, 32, 4, 1, 161), AttentionTiles(16, 16, 4, 1, 97)),
    },
    ("query", False): {
        64: (AttentionTiles(128, 64, 8, 3, 65),),
        128: (AttentionTiles(128, 64, 8, 3, 129), AttentionTiles(128, 64, 8, 2, 97)),
        256: (AttentionTiles(128, 32, 8, 2, 169), AttentionTiles(64, 32, 4, 1, 97)),
    },
    ("query", True): {
        64: (AttentionTiles(32, 16, 4, 1, 37),),
        128: (AttentionTiles(32, 16, 4, 1, 73),),
        256: (AttentionTiles(32, 16, 4, 1, 145), AttentionTiles(16, 16, 4, 1, 81)),
    },
}


_BESIDE = AttentionTiles(64, 64, 4, 2, 97)
"""of the query kernel at head dims up to 128, two of which share a multiprocessor with each other or a key program"""
_NARROW = 256
"""keys of a window up to which a block of queries sees few blocks of keys"""
_NARROW_TILES = {
    "forward": AttentionTiles(64, 64, 4, 3, 65),
    "key": AttentionTiles(64, 64, 4, 2, 49),
}
"""of small heads under a narrow window: the larger tiles take all registers of a multiprocessor for one program, whose
few loads nothing then covers, and half of what they compute is masked"""


PACKED_NARROW: AttentionTiles | None = AttentionTiles(128, 32, 4, 4, 49, pack=8)
"""forward, of heads that share keys under a narrow window: 16 tokens of 8 heads see 160 keys in five blocks, where 64
tokens of one head see 192, so that half as much is read from L2 and a fifth less computed; a quarter faster. None: one
head per block"""
ONE_LOOP_NARROW = True
"""backward, under a narrow window: all blocks that see each other in one masked loop, over the heads that share keys
too; False: a loop over those without hidden pairs as well. Three loops per head were a tenth slower"""
DOCUMENTS_AHEAD = True
"""forward, with document numbers: as many stages as without where no number is loaded, one less at the edges; False:
one less everywhere, a tenth slower"""


def is_narrow(q: Tensor, window: int) -> bool:
    """Whether a block of queries sees few blocks of keys, in a dtype and size that narrow tiles are for."""
    return 0 < window <= _NARROW and q.dtype != torch.float32 and q.shape[-1] <= 64


def attention_tiles(
    kernel: str, q: Tensor, *, packed: bool = False, window: int = 0, group: int = 1, concurrent: bool = False
) -> AttentionTiles:
    """For the 'forward' kernel, or the backward kernels of keys ('key') or queries ('query'); `packed`: rows of several
    documents; `group`: query heads that may share a block; `concurrent`: the query kernel beside the key kernel."""
    if concurrent and q.dtype != torch.float32 and 64 < q.shape[-1] <= 128:
        return first_fitting(q.device, (_BESIDE, *_TILES[kernel, False][128]), lambda each: each.shared_kb << 10)
    if is_narrow(q, window) and kernel in _NARROW_TILES:
        shared = PACKED_NARROW if kernel == "forward" else None
        return shared if shared is not None and group % shared.pack == 0 else _NARROW_TILES[kernel]
    table = _TILES[kernel, q.dtype == torch.float32]
    tiles = next(tiles for most, tiles in table.items() if q.shape[-1] <= most)
    # for head dim 128, three stages just let two programs share a multiprocessor; with document numbers only two do
    if packed and q.dtype != torch.float32 and 64 < q.shape[-1] <= 128:
        tiles = (replace(tiles[0], edge_stages=tiles[0].stages - 1), *tiles[1:]) if DOCUMENTS_AHEAD else tiles[1:]
    chip = accelerator_of(q.device)
    blackwell = chip is not None and chip.capability[0] == 10
    return first_fitting(q.device, tiles, lambda each: ((blackwell and each.sm_100_kb) or each.shared_kb) << 10)


def can_copy(*tensors: Tensor) -> bool:
    """Whether tiles can be loaded by TMA: a Hopper GPU or newer, a power-of-two head dim, everything aligned to 16
    bytes."""
    return all(
        ((chip := accelerator_of(x.device)) is None or chip.tma)
        and x.shape[-1] >= 16
        and x.shape[-1] == power_of_two(x.shape[-1])
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
        for x in tensors
    )


def described(x_BTND: Tensor, length: int) -> TensorDescriptor:
    """A descriptor of tiles of `length` tokens of one head."""
    return TensorDescriptor.from_tensor(x_BTND, [1, length, 1, x_BTND.shape[-1]])
