"""GPU latencies as inline PTX in one warp: chains of dependent instructions between two reads of the clock.

Each text is one block of PTX with its own registers and labels; `$` are its operands. A chain gives its result to an
output, so that nothing of it can be left out. ptxas still chooses registers and orders what is independent: which
register banks an FFMA reads, and its reuse flags, can only be set in SASS.
"""

UNROLL = 8
_LOOP = """{{
.reg .u32 i; .reg .pred more; .reg .u64 begin, end, since, until; {registers}
{setup}
{warm}
mov.u64 since, %globaltimer;
mov.u64 begin, %clock64;
mov.u32 i, $4;
AGAIN:
{body}
add.s32 i, i, -{unroll};
setp.gt.s32 more, i, 0;
@more bra AGAIN;
mov.u64 end, %clock64;
mov.u64 until, %globaltimer;
sub.u64 $0, end, begin;
sub.u64 $1, until, since;
{result}
}}"""
CONSTRAINTS = "=l,=l,=l,l,r,r"
"""cycles, nanoseconds and what a chain ended with; an address, instructions to time, instructions before them"""


def _text(body: str, *, registers: str = "", setup: str = "", warm: str = "", result: str = "") -> str:
    lines = "\n".join([body] * UNROLL)
    return _LOOP.format(
        body=lines, registers=registers, setup=setup, warm=warm, result=result or "mov.u64 $2, 0;", unroll=UNROLL
    )


def chase(cache: str) -> str:
    """Loads whose address is what the one before loaded, through L1 ('ca') or from L2 on ('cg')."""
    load = f"ld.global.{cache}.u64 at, [at];"
    begin, end = (
        ["mov.u32 i, $5;", "WARM:"],
        [f"add.s32 i, i, -{UNROLL};", "setp.gt.s32 more, i, 0;", "@more bra WARM;"],
    )
    warm = "\n".join([*begin, *([load] * UNROLL), *end])
    return _text(load, registers=".reg .u64 at;", setup="mov.u64 at, $3;", warm=warm, result="mov.u64 $2, at;")


def shared_loads() -> str:
    """Loads from shared memory at lane · $5 words, each of which holds its own address: with a stride of s, gcd(s, 32)
    lanes share a bank."""
    return _text(
        "ld.shared.u32 at, [at];",
        registers=".reg .u32 at, lane; .shared .align 16 .b8 words[16384];",
        setup="mov.u32 lane, %laneid;\nmul.lo.u32 lane, lane, $5;\nshl.b32 lane, lane, 2;\nmov.u32 at, words;\n"
        "add.u32 at, at, lane;\nst.shared.u32 [at], at;\nbar.warp.sync 0xffffffff;",
        result="cvt.u64.u32 $2, at;",
    )


def fma(sources: int, chains: int) -> str:
    """`chains` independent chains of FFMA whose inputs are 1, 2 or 3 different registers."""
    inputs = {1: "x{n}, x{n}, x{n}", 2: "x{n}, b, x{n}", 3: "b, c, x{n}"}[sources]
    body = "\n".join(f"fma.rn.f32 x{n}, {inputs.format(n=n)};" for n in range(chains))
    names = ", ".join(f"x{n}" for n in range(chains))
    start = "\n".join(f"add.f32 x{n}, b, {n}.0;" for n in range(chains))
    total = "\n".join(f"add.f32 x0, x0, x{n};" for n in range(1, chains))
    return _text(
        body,
        registers=f".reg .f32 b, c, {names};",
        setup=f"cvt.rn.f32.u32 b, $5;\nadd.f32 c, b, 0f3F000000;\n{start}",
        result=f"{total}\ncvt.rzi.u64.f32 $2, x0;",
    )


def atomic_add() -> str:
    """Adds to one address of global memory, each of whose results is the next one's addend less itself: 0."""
    return _text(
        "atom.global.add.u64 got, [at], got;\nand.b64 got, got, zero;",
        registers=".reg .u64 at, got, zero;",
        setup="mov.u64 at, $3;\ncvt.u64.u32 zero, $5;\nmov.u64 got, zero;",
        result="mov.u64 $2, got;",
    )


def barrier() -> str:
    return _text("bar.sync 0;")
