"""Integer weights of tokens, bit-equal to `armillary.kernels.sampling.sampling`, and the last step of sampling:
thresholds of a row's filters by bisection, then the draw.

Kernels that use these are launched with `enable_fp_fusion=False`: a fused multiply-add would round once, not twice.
Bits of positive floats are ordered like the floats, so a threshold is an integer and is found in at most thirty passes
over the candidates, or over all weights of the row where the candidates do not suffice.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.sampling.sampling import EXP2, LOG2E, ONE

_E: tl.constexpr = tl.constexpr(EXP2)
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_ONE: tl.constexpr = tl.constexpr(ONE)
_UNIT: tl.constexpr = tl.constexpr(2.0**ONE)
_ABOVE_ALL: tl.constexpr = tl.constexpr(0x3F800001)  # the bits after those of 1.0
_BELOW_ALL: tl.constexpr = tl.constexpr(0x2A000000)  # the bits of 2^-43: no weight is less


@triton.jit
def scores_of(
    b,
    token,
    source,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    PENALTIES: tl.constexpr,
    ROWS: tl.constexpr,
    ALLOWED: tl.constexpr,
):
    """Scores of some tokens of row b; -inf where there are none. `source` is (logits, repetition, presence, frequency,
    counts, prompt, rows, allowed)."""
    logits, repetition, presence, frequency, counts, prompt, rows, allowed = source
    there = token < V
    x = tl.load(logits + b.to(tl.int64) * V + token, mask=there, other=float("-inf")).to(tl.float32)
    if PENALTIES:
        state = tl.load(rows + b).to(tl.int64) if ROWS else b.to(tl.int64)
        count = tl.load(counts + state * V + token, mask=there, other=0)
        in_prompt = tl.load(prompt + state * V + token, mask=there, other=0).to(tl.int32)
        factor = tl.where((in_prompt != 0) | (count > 0), tl.load(repetition + b).to(tl.float32), 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - tl.load(frequency + b).to(tl.float32) * count.to(tl.float32)
        x = x - tl.where(count > 0, tl.load(presence + b).to(tl.float32), 0.0)
    if ALLOWED:
        word = tl.load(allowed + b.to(tl.int64) * WORDS + token // 32, mask=there, other=0)
        x = tl.where((word >> (token % 32)) & 1 == 1, x, float("-inf"))
    return tl.where(there, x, float("-inf"))


@triton.jit
def factor_of(temperature, b):
    """log2 e over the temperature of a row."""
    heat = tl.load(temperature + b).to(tl.float32)
    return tl.div_rn(tl.zeros([], tl.float32) + _LOG2E, tl.where(heat > 0, heat, 1.0))


@triton.jit
def weights_of(scores, top, factor):
    """2^((score - top) · factor) in fp32, at most 1."""
    below = tl.where(scores == top, 0.0, scores) - tl.where(scores == top, 0.0, top)  # inf - inf is NaN
    power = tl.where(scores == top, 0.0, tl.maximum(below * factor, -_ONE - 2.0))
    exponent = tl.floor(power + 0.5)
    part = power - exponent
    value = tl.full(part.shape, _E[5], tl.float32)
    value = value * part + _E[4]
    value = value * part + _E[3]
    value = value * part + _E[2]
    value = value * part + _E[1]
    value = value * part + _E[0]
    value = value * part + 1.0
    return value * ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(weights):
    return (weights * _UNIT).to(tl.int64)


@triton.jit
def least_of(min_p, b):
    """The mass that min-p requires; the likeliest token always has it."""
    least = tl.load(min_p + b).to(tl.float32)
    return mass_of(tl.where(least > 1.0, 1.0, least))


@triton.jit
def share_of(total, fraction, BITS: tl.constexpr):
    """⌊total · fraction / 2^BITS⌋."""
    return (((total >> 32) * fraction) << (32 - BITS)) + (((total & 0xFFFFFFFF) * fraction) >> BITS)


@triton.jit
def _passing(values, start, size, least, bits, BLOCK: tl.constexpr):
    """Masses of a block of weights that reach both thresholds, 0 elsewhere, and which do."""
    at = start + tl.arange(0, BLOCK)
    weights = tl.load(values + at, mask=at < size, other=-1.0)
    mass = mass_of(weights)
    passing = (weights >= 0) & (weights.to(tl.int32, bitcast=True) >= bits) & (mass >= least)
    return tl.where(passing, mass, 0), passing


@triton.jit
def _sums(values, size, least, bits, BLOCK: tl.constexpr):
    """Number and mass of the weights that reach both thresholds."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        mass, passing = _passing(values, start, size, least, bits, BLOCK)
        counts += passing.to(tl.int32)
        masses += mass
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _kth(values, size, k, BLOCK: tl.constexpr):
    """Bits that the k likeliest reach, and tokens as likely as the last of them, and no others."""
    low, high = tl.zeros([], tl.int32) + _BELOW_ALL, tl.zeros([], tl.int32) + _ABOVE_ALL
    count = tl.zeros([], tl.int32) + size
    while (high - low > 1) & (count != k):
        middle = low + (high - low) // 2
        new, _ = _sums(values, size, 0, middle, BLOCK)
        enough = new >= k
        low = tl.where(enough, middle, low)
        count = tl.where(enough, new, count)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _nucleus(values, size, least, low, total, wanted, BLOCK: tl.constexpr):
    """The highest bits down to which `wanted` mass is reached, and the mass down to there."""
    high = tl.zeros([], tl.int32) + _ABOVE_ALL
    above, upto = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + size + 2
    while (high - low > 1) & (upto - above > 1):
        middle = low + (high - low) // 2
        count, mass = _sums(values, size, least, middle, BLOCK)
        enough = mass >= wanted
        low = tl.where(enough, middle, low)
        total = tl.where(enough, mass, total)
        upto = tl.where(enough, count, upto)
        high = tl.where(enough, high, middle)
        above = tl.where(enough, above, count)
    return low, total


@triton.jit
def _first_beyond(values, size, least, bits, target, BLOCK: tl.constexpr):
    """Where the running sum of kept masses passes `target`."""
    place = tl.zeros([], tl.int32) - 1
    before = tl.zeros([], tl.int64)
    start = 0
    while (place < 0) & (start < size):
        mass, _ = _passing(values, start, size, least, bits, BLOCK)
        after = before + tl.sum(mass, 0)
        inside = start + tl.sum((before + tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
        place = tl.where(after > target, inside, place)
        before = after
        start += BLOCK
    return place


@triton.jit
def _token_beyond(values, tokens, size, least, bits, target, V: tl.constexpr, CAPACITY: tl.constexpr):
    """The same in the order of token ids for candidates, which are unordered: by bisection of the ids."""
    mass, _ = _passing(values, 0, size, least, bits, CAPACITY)
    at = tl.arange(0, CAPACITY)
    token = tl.load(tokens + at, mask=at < size, other=V)
    low, high = tl.zeros([], tl.int32) - 1, tl.zeros([], tl.int32) + V - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        beyond = tl.sum(tl.where(token <= middle, mass, 0), 0) > target
        low = tl.where(beyond, low, middle)
        high = tl.where(beyond, middle, high)
    return high


@triton.jit
def _unfiltered(
    b,
    source,
    top,
    factor,
    least,
    random,
    piece_masses,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    PENALTIES: tl.constexpr,
    ROWS: tl.constexpr,
    ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
):
    """With min-p at most: the masses of the pieces lead to the piece, its tokens to the token."""
    piece = tl.arange(0, PIECES_PAD)
    target = share_of(tl.sum(piece_masses, 0), random, 31)
    number = tl.sum(((tl.cumsum(piece_masses, 0) <= target) & (piece < PIECES)).to(tl.int32), 0)
    before = tl.sum(tl.where(piece < number, piece_masses, 0), 0)
    token = number * BLOCK + tl.arange(0, BLOCK)
    mass = mass_of(weights_of(scores_of(b, token, source, V, WORDS, PENALTIES, ROWS, ALLOWED), top, factor))
    mass = tl.where(mass >= least, mass, 0)
    return number * BLOCK + tl.sum((before + tl.cumsum(mass, 0) <= target).to(tl.int32), 0)


@triton.jit
def draw(
    logits,
    repetition,
    presence,
    frequency,
    counts,
    prompt,
    rows,
    allowed,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    steps,
    row_tops,
    masses,
    arrived,
    candidates,
    candidate_ids,
    out,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    PENALTIES: tl.constexpr,
    ROWS: tl.constexpr,
    ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    CAPACITY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row). `candidates` has CAPACITY candidates of each row, then space for all its weights."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    top = tl.load(row_tops + b)
    if (tl.load(temperature + b) <= 0) | (top != top):  # already decided
        return
    source = (logits, repetition, presence, frequency, counts, prompt, rows, allowed)
    factor = factor_of(temperature, b)
    piece = tl.arange(0, PIECES_PAD)
    piece_masses = tl.load(masses + b * PIECES + piece, mask=piece < PIECES, other=0)
    k = tl.load(top_k + b).to(tl.int32)
    k = tl.where((k <= 0) | (k >= V), 0, k)
    p = tl.load(top_p + b).to(tl.float32)
    least = least_of(min_p, b)
    step = tl.load(steps + b)
    words = tl.philox(
        tl.load(seeds + b),
        (step & 0xFFFFFFFF).to(tl.uint32),
        (step >> 32).to(tl.uint32),
        tl.zeros([], tl.uint32),
        tl.zeros([], tl.uint32),
    )
    random = (words[0].to(tl.uint32) >> 1).to(tl.int64)
    if (k == 0) & (p >= 1.0):
        token = _unfiltered(
            b,
            source,
            top,
            factor,
            least,
            random,
            piece_masses,
            V,
            WORDS,
            PENALTIES,
            ROWS,
            ALLOWED,
            BLOCK,
            PIECES,
            PIECES_PAD,
        )
        tl.store(out + b, token.to(tl.int64))
        return

    values = candidates + b.to(tl.int64) * (CAPACITY + V)
    total = tl.sum(piece_masses, 0)
    fraction = (tl.minimum(tl.maximum(p, 0.0), 1.0) * 1073741824.0).to(tl.int64)
    size = tl.load(arrived + b)
    suffices = size <= CAPACITY
    if suffices:
        if k > 0:
            suffices = size >= k
        else:
            _, candidate_mass = _sums(values, size, least, 0, CAPACITY)
            suffices = candidate_mass >= tl.maximum(share_of(total, fraction, 30), 1)
    if not suffices:  # all weights of the row take the place of the candidates
        values += CAPACITY
        size = V
        for start in range(0, V, CAPACITY):
            token = start + tl.arange(0, CAPACITY)
            weights = weights_of(scores_of(b, token, source, V, WORDS, PENALTIES, ROWS, ALLOWED), top, factor)
            tl.store(values + token, weights, mask=token < V)
        tl.debug_barrier()
    bits = tl.zeros([], tl.int32) + _BELOW_ALL
    if k > 0:
        bits = _kth(values, size, k, CAPACITY)
        _, total = _sums(values, size, least, bits, CAPACITY)
    if p < 1.0:
        wanted = tl.maximum(share_of(total, fraction, 30), 1)
        bits, total = _nucleus(values, size, least, bits, total, wanted, CAPACITY)
    target = share_of(total, random, 31)
    if suffices:
        token = _token_beyond(values, candidate_ids + b * CAPACITY, size, least, bits, target, V, CAPACITY)
        tl.store(out + b, token.to(tl.int64))
    else:
        token = _first_beyond(values, size, least, bits, target, CAPACITY)
        tl.store(out + b, token.to(tl.int64))
