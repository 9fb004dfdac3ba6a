"""int8 and int4 weights on one core: the kernels that read codes, next to plain fp32 and to dequantising in every call.

    python benchmarks/integer_weights_cpu.py [--outputs 2048] [--inputs 2048]

Times are the thread's CPU time, best of some calls, so that other work on the machine changes little.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.quantized.integer_weights_cpu import Int4Weight, Int8Weight, tile_rows
from armillary.model.quantized.formats import IntGroups, pack_nibbles

TOKENS = (1, 4, 16, 32, 33, 64, 65, 512)
GROUP = 128


def seconds(call: Callable[[], Tensor], times: int = 5) -> float:
    call()
    found = []
    for _ in range(times):
        begin = time.thread_time()
        call()
        found.append(time.thread_time() - begin)
    return min(found)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--outputs", type=int, default=2048)
    asked.add_argument("--inputs", type=int, default=2048)
    given = asked.parse_args()
    torch.set_num_threads(1)
    shape = given.outputs, given.inputs
    print(f"{torch.backends.cpu.get_cpu_capability()}, tiles of {tile_rows()} rows, {shape[0]} × {shape[1]}, ms\n")
    weight = torch.randn(shape)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    scale = torch.rand(shape[0], shape[1] // GROUP)
    int8, int4 = Int8Weight.rounded(weight), Int4Weight.of(codes, scale, None, GROUP)
    format, rows = IntGroups(bits=4, group=GROUP, zeros=False), {"codes": pack_nibbles(codes), "scale": scale}
    print("| tokens | fp32 | int8 | int4 | int4 dequantised | int4, GFLOP/s |\n|---:|---:|---:|---:|---:|---:|")
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1])
        found = [
            seconds(lambda x=x: F.linear(x, weight)),  # type: ignore[misc]
            seconds(lambda x=x: int8(x)),  # type: ignore[misc]
            seconds(lambda x=x: int4(x)),  # type: ignore[misc]
            seconds(lambda x=x: F.linear(x, format.dequantise(rows)), 2),  # type: ignore[misc]
        ]
        rate = 2 * tokens * shape[0] * shape[1] / found[2] / 1e9
        print(f"| {tokens} | {' | '.join(f'{1e3 * each:.2f}' for each in found)} | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
