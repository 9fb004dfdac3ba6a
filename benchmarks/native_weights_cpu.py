"""The C++ kernels over packed weights on one core, every format, next to plain fp32 (MKL).

    python benchmarks/native_weights_cpu.py [--outputs 2048] [--inputs 2048]

Times are the thread's CPU time, best of some calls, so that other work on the machine changes little.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.native.library import units
from armillary.kernels.native.packed_weight import Codes, PackedWeight

TOKENS = (1, 4, 12, 192)


def random_codes(rows: int, columns: int) -> dict[str, Codes]:
    def whole(count: int, most: int) -> Tensor:
        return torch.randint(0, most, (rows, count), dtype=torch.uint8)

    def scale(count: int) -> Tensor:
        return torch.rand(rows, count) + 0.1

    eight, four, by_32, by_256 = whole(columns, 256), whole(columns, 16), columns // 32, columns // 256
    k_quant = {
        "scale_NG": whole(by_32, 64),
        "minimum_NG": whole(by_32, 64),
        "super_NS": scale(by_256).half(),
        "super_minimum_NS": scale(by_256).half(),
    }
    row = {"codes_NK": eight, "bits": 8, "group": columns, "scale_NG": scale(1), "zero": 128}
    signed = whole(columns // 16, 256).view(torch.int8)
    int4 = {"codes_NK": four, "bits": 4, "group": 128, "scale_NG": scale(columns // 128).bfloat16()}
    return {
        "int8, a scale per row": Codes(**row),
        "the same, inputs per token (W8A8)": Codes(**row, inputs="token"),
        "Q8_0": Codes(codes_NK=eight, bits=8, group=32, scale_NG=scale(by_32).half(), zero=128),
        "int4, groups of 128": Codes(**int4, zero=8),
        "the same with zero points (GPTQ, AWQ)": Codes(**int4, zero_NG=whole(columns // 128, 16)),
        "Q4_0": Codes(codes_NK=four, bits=4, group=32, scale_NG=scale(by_32).half(), zero=8),
        "Q4_K": Codes(codes_NK=four, bits=4, group=32, **k_quant),
        "Q5_K": Codes(codes_NK=whole(columns, 32), bits=5, group=32, **k_quant),
        "Q6_K": Codes(
            codes_NK=whole(columns, 64), bits=6, group=16, scale_NG=signed, super_NS=k_quant["super_NS"], zero=32
        ),
        "MXFP4": Codes(codes_NK=four, bits=4, group=32, scale_NG=whole(by_32, 9) + 120, fp4="e8m0"),
        "NVFP4": Codes(
            codes_NK=four, bits=4, group=16, scale_NG=whole(columns // 16, 127), fp4="e4m3", super_NS=scale(1)
        ),
    }


def seconds(call: Callable[[], Tensor], times: int) -> float:
    call()
    best = float("inf")
    for _ in range(times):
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return best


def row(name: str, call: Callable[[Tensor], Tensor], shape: tuple[int, int], num_bytes: int) -> str:
    cells = []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1])
        best = seconds(lambda x=x: call(x), 20 if tokens < 100 else 3)  # type: ignore[misc]
        rate = (
            f"{num_bytes / best / 1e9:.1f} GB/s"
            if tokens == 1
            else f"{2 * tokens * x.shape[1] * shape[0] / best / 1e9:.0f} G/s"
        )
        cells.append(f"{1e3 * best:.3f} ({rate})")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--outputs", type=int, default=2048)
    asked.add_argument("--inputs", type=int, default=2048)
    given = asked.parse_args()
    torch.set_num_threads(1)
    shape = given.outputs, given.inputs
    print(f"{units()}, {shape[0]} × {shape[1]}, ms by tokens (multiply-adds count as two)\n")
    print(f"| | {' | '.join(map(str, TOKENS))} |\n|---|{'---:|' * len(TOKENS)}")
    plain = torch.randn(shape)
    print(row("fp32, MKL", lambda x: F.linear(x, plain), shape, plain.nbytes), flush=True)
    for name, codes in random_codes(*shape).items():
        weight = PackedWeight.of([codes])
        print(row(name, weight, shape, weight.nbytes), flush=True)


if __name__ == "__main__":
    main()
