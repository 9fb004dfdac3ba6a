"""One token through a whole model in one launch: programs stay resident and go through the layers together.

A small kernel for each product costs several microseconds of start, end and empty memory pipes; a model of a billion
weights has two hundred of them a token. Here one program a multiprocessor goes through all phases of all layers, and
they meet between phases at a counter. Weights do not depend on what is computed, so the first ones of the next phase
are in registers, and more of them in L2, before a program waits for the others: memory never rests.

What other programs wrote in this launch is read past L1 (`.cg`), which no one keeps coherent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.launch_triton import fetch

# K inputs of a product, R rows of its weight at a time, N keys of a tile, M query heads of a KV head, D head dim

ALL_PHASES = 127
"""bits: projection, attention, its sum, out, up, down, and behind the layers the output product"""


@triton.jit
def _seen(counter):
    """How many have come, and all they wrote before."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s64 $0, [$1];", "=l,l", [counter], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _arrive(counter, FUSED: tl.constexpr):
    if FUSED:
        tl.debug_barrier()  # all threads of the program have written
        tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _wait(counter, goal, FUSED: tl.constexpr):
    if FUSED:
        seen = _seen(counter)
        while seen < goal:
            seen = _seen(counter)


@triton.jit
def _share(units):
    """The units of this program: [first, last)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    return units * program // programs, units * (program + 1) // programs


@triton.jit
def _pointer(layers, which, like):
    """A tensor of the layer's, whose address stands in a table."""
    return tl.multiple_of(tl.load(layers + which).to(like.dtype), 16)


@triton.jit
def _either(first, a, b):
    """One of two addresses."""
    return tl.multiple_of(tl.where(first, a.to(tl.int64), b.to(tl.int64)).to(b.dtype), 16)


@triton.jit
def _rows(weight, unit, last, ROWS, K: tl.constexpr, K_PAD: tl.constexpr, R: tl.constexpr):
    """R rows of a weight [R, K_PAD]; zeros beyond the last unit."""
    row = unit * R + tl.arange(0, R)
    k = tl.arange(0, K_PAD)
    mask = ((row < ROWS) & (unit < last))[:, None] & (k < K)[None, :]
    return tl.load(weight + row.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0,
                   eviction_policy="evict_first")  # fmt: skip


@triton.jit
def _ahead(weight, units, K: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr):
    """The first bytes of this program's share of a weight into L2."""
    if AHEAD > 0:
        line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # 128 bytes
        first, last = _share(units)
        offset = tl.minimum(tl.arange(0, AHEAD // 128) * line, (last - first) * (R * K) - 1)
        fetch(weight + (first * R).to(tl.int64) * K + tl.maximum(offset, 0))


@triton.jit
def _absorbed(sums, w, x_K, unit, base, K_PAD: tl.constexpr, R: tl.constexpr, PIECES: tl.constexpr, U: tl.constexpr):
    """Sums [R, PIECES, U] of rows, each warp's for itself, with those of one more unit: so warps wait for each other
    only where all units are done."""
    PIECE: tl.constexpr = 256 if K_PAD >= 256 else K_PAD
    y = w.to(tl.float32) * x_K[None, :]
    y = tl.sum(tl.reshape(y, [R, K_PAD // (PIECES * PIECE), PIECES, PIECE]), 1)
    y = tl.sum(y, 2)
    mine = tl.arange(0, U) == unit - base
    return tl.where(mine[None, None, :], y[:, :, None], sums)


@triton.jit
def _finish(sums, base, last, residual, out, ROWS, R: tl.constexpr, U: tl.constexpr, GATED: tl.constexpr,
            HAS_RESIDUAL: tl.constexpr):  # fmt: skip
    """Results of units from `base` on: the gate or the residual."""
    kind = out.dtype.element_ty
    y = tl.sum(sums, 1).to(kind).to(tl.float32)  # plain torch rounds the product first; so does this
    unit = base + tl.arange(0, U)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (R // 2, 2, U)), (0, 2, 1)))
        row = unit[None, :] * (R // 2) + tl.arange(0, R // 2)[:, None]
        mask = (row < ROWS // 2) & (unit < last)[None, :]
        tl.store(out + row, (gate * tl.sigmoid(gate) * up).to(kind), mask=mask)
    else:
        row = unit[None, :] * R + tl.arange(0, R)[:, None]
        mask = (row < ROWS) & (unit < last)[None, :]
        if HAS_RESIDUAL:
            y += tl.load(residual + row, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + row, y.to(kind), mask=mask)


@triton.jit
def _product(
    weight, a, b, c, d, x_K, residual, out, ROWS, units,
    K: tl.constexpr, K_PAD: tl.constexpr, R: tl.constexpr, PIECES: tl.constexpr, GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """This program's rows of weight @ x; the first four units of it are on their way. Each of four sets of registers
    is filled again where it was used: to hand them on would be to wait for what is under way."""
    U: tl.constexpr = 32
    line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(4 * R * K // line + 1)
    first, last = _share(units)
    for base in range(first, last, U):
        sums = tl.zeros([R, PIECES, U], tl.float32)
        end = tl.minimum(base + U, last)
        for unit in range(base, end, 4):
            if RUN > 0:
                begin = tl.minimum(unit + 4 + RUN, last - 1).to(tl.int64) * (R * K)
                left = (last - 1).to(tl.int64) * (R * K) - begin + (R * K - 1)
                fetch(weight + begin + tl.minimum(tl.arange(0, LINES) * line, left))
            sums = _absorbed(sums, a, x_K, unit, base, K_PAD, R, PIECES, U)
            a = _rows(weight, unit + 4, last, ROWS, K, K_PAD, R)
            sums = _absorbed(sums, b, x_K, unit + 1, base, K_PAD, R, PIECES, U)
            b = _rows(weight, unit + 5, last, ROWS, K, K_PAD, R)
            sums = _absorbed(sums, c, x_K, unit + 2, base, K_PAD, R, PIECES, U)
            c = _rows(weight, unit + 6, last, ROWS, K, K_PAD, R)
            sums = _absorbed(sums, d, x_K, unit + 3, base, K_PAD, R, PIECES, U)
            d = _rows(weight, unit + 7, last, ROWS, K, K_PAD, R)
        _finish(sums, base, end, residual, out, ROWS, R, U, GATED, HAS_RESIDUAL)


@triton.jit
def _begin(weight, units, ROWS, K: tl.constexpr, K_PAD: tl.constexpr, R: tl.constexpr):
    """The first four units of this program's share."""
    first, last = _share(units)
    return (_rows(weight, first, last, ROWS, K, K_PAD, R), _rows(weight, first + 1, last, ROWS, K, K_PAD, R),
            _rows(weight, first + 2, last, ROWS, K, K_PAD, R), _rows(weight, first + 3, last, ROWS, K, K_PAD, R))


@triton.jit
def _read(x, K: tl.constexpr, K_PAD: tl.constexpr):
    k = tl.arange(0, K_PAD)
    return tl.load(x + k, mask=k < K, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _normed(x_K, weight_K, eps, kind: tl.constexpr, K: tl.constexpr):
    """The RMS norm, rounded as if it were stored."""
    inverse = tl.rsqrt(tl.sum(x_K * x_K, 0) / K + eps)
    return (x_K * inverse * weight_K.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _places(table, tile, length, page_stride, slot_stride, N: tl.constexpr, PAGE: tl.constexpr):
    """Where the keys of a tile stand in a layer's cache; those beyond the last stand for it."""
    key = tl.minimum(tile * N + tl.arange(0, N), tl.maximum(length - 1, 0))
    return tl.load(table + key // PAGE).to(tl.int64) * page_stride + (key % PAGE) * slot_stride


@triton.jit
def _keys(cache, at_N, kv_stride, D: tl.constexpr):
    """Both halves of keys, and values."""
    half, dim = tl.arange(0, D // 2), tl.arange(0, D)
    k_at = cache + at_N[:, None] + half[None, :]
    return (tl.load(k_at, cache_modifier=".cg"), tl.load(k_at + D // 2, cache_modifier=".cg"),
            tl.load(cache + kv_stride + at_N[:, None] + dim[None, :], cache_modifier=".cg"))  # fmt: skip


@triton.jit
def _turned(a, b, c, s, weight, eps, NORM: tl.constexpr, D: tl.constexpr):
    """Rows in two halves [rows, D/2]: RMS norm where there is one, then rotation."""
    if NORM:
        half = tl.arange(0, D // 2)
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a = a * inverse * tl.load(weight + half).to(tl.float32)[None, :]
        b = b * inverse * tl.load(weight + D // 2 + half).to(tl.float32)[None, :]
    return a * c[None, :] - b * s[None, :], b * c[None, :] + a * s[None, :]


@triton.jit
def _attend(
    qkv, cache, q_weight, k_weight, table, at_N, ka, kb, v, c, s, partial, peaks, slot, length, head, split, per,
    tiles, qk_eps, scale, page_stride, kv_stride, slot_stride,
    NORM: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A KV head and a stretch of keys, the first tile of which is there but for the newest key; a partial softmax.
    Whoever has the newest key's tile writes it to the cache."""
    HALF: tl.constexpr = D // 2
    half, dim, member, n = tl.arange(0, HALF), tl.arange(0, D), tl.arange(0, M), tl.arange(0, N)
    kind = v.dtype
    rows = qkv + head * ((GROUP + 2) * D)
    used = (member < GROUP)[:, None]
    q_at = rows + member[:, None] * D + half[None, :]
    qa = tl.load(q_at, mask=used, other=0.0, cache_modifier=".cg").to(tl.float32)
    qb = tl.load(q_at + HALF, mask=used, other=0.0, cache_modifier=".cg").to(tl.float32)
    new = rows + GROUP * D
    na = tl.load(new + half[None, :], cache_modifier=".cg").to(tl.float32)
    nb = tl.load(new + HALF + half[None, :], cache_modifier=".cg").to(tl.float32)
    nv = tl.load(new + D + dim[None, :], cache_modifier=".cg").to(kind)
    qa, qb = _turned(qa, qb, c, s, q_weight, qk_eps, NORM, D)
    na, nb = _turned(na, nb, c, s, k_weight, qk_eps, NORM, D)
    qa, qb, na, nb = qa.to(kind), qb.to(kind), na.to(kind), nb.to(kind)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    stop = tl.minimum((split + 1) * per, tiles)
    factor = scale * 1.4426950408889634
    for tile in range(split * per, stop):
        key = tile * N + n
        newest = (key == length - 1)[:, None]
        scores = tl.dot(qa, tl.trans(tl.where(newest, na, ka)), input_precision=PRECISION)
        scores = tl.dot(qb, tl.trans(tl.where(newest, nb, kb)), scores, input_precision=PRECISION)
        scores = tl.where((key < length)[None, :], scores * factor, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(weights, 1)
        sums = tl.dot(weights.to(kind), tl.where(newest, nv, v), sums * keep[:, None], input_precision=PRECISION)
        top = new_top
        if tile + 1 < stop:
            at_N = _places(table, tile + 1, length, page_stride, slot_stride, N, PAGE)
            ka, kb, v = _keys(cache, at_N, kv_stride, D)
    if split * per < tiles:
        q_head = split * (HEADS * GROUP) + head * GROUP + member
        tl.store(peaks + q_head, top + tl.log2(total), mask=member < GROUP)
        tl.store(partial + q_head[:, None] * D + dim[None, :], sums / total[:, None], mask=used)
        if (stop == tiles) & (slot >= 0):
            place = cache + slot // PAGE * page_stride + slot % PAGE * slot_stride
            tl.store(place + half[None, :], na)
            tl.store(place + HALF + half[None, :], nb)
            tl.store(place + kv_stride + dim[None, :], nv)


@triton.jit
def _attended(partial, peaks, k, SIZE: tl.constexpr, used, HEADS_Q: tl.constexpr, D: tl.constexpr, S: tl.constexpr):
    """Attention's result at places k of all heads, from up to S partial ones and the logarithms of their sums."""
    split = tl.arange(0, S)[:, None]
    there = (split < used) & (k < SIZE)[None, :]
    peak = tl.load(peaks + split * HEADS_Q + (k // D)[None, :], mask=there, other=float("-inf"), cache_modifier=".cg")
    values = tl.load(partial + split * (HEADS_Q * D) + k[None, :], mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(weight, 0)
    return tl.sum(values * weight, 0) / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _all_attended(partial, peaks, used, HEADS_Q: tl.constexpr, D: tl.constexpr, S: tl.constexpr, Q_PAD: tl.constexpr):
    """The same at all places."""
    split, head, dim = tl.arange(0, S), tl.arange(0, Q_PAD // D), tl.arange(0, D)
    there = (split < used)[:, None] & (head < HEADS_Q)[None, :]
    at = split[:, None] * HEADS_Q + head[None, :]
    peak = tl.load(peaks + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    values = tl.load(partial + at[:, :, None] * D + dim[None, None, :], mask=there[:, :, None], other=0.0,
                     cache_modifier=".cg")  # fmt: skip
    top = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)[None, :]
    return tl.reshape(tl.sum(values * weight[:, :, None], 0), [Q_PAD])


@triton.jit
def whole_step(
    layers, embedding, last_norm, output, packed, tokens, tables, cos, sin, blocks,
    stream, middle, qkv, mixed, inner, partial, peaks, logits, counter,
    num_layers, first_layer, last_layer, eps, qk_eps, scale, vocab, tokens_stride, table_stride,
    layer_stride, page_stride, kv_stride, head_stride, slot_stride, at_row, at_position, at_angle, at_slot, at_length,
    NORM: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    H: tl.constexpr, H_PAD: tl.constexpr, Q_PAD: tl.constexpr, F: tl.constexpr, F_PAD: tl.constexpr,
    P_H: tl.constexpr, P_Q: tl.constexpr, P_F: tl.constexpr, R_H: tl.constexpr, R_U: tl.constexpr,
    R_Q: tl.constexpr, R_F: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    FEW: tl.constexpr, SLICE: tl.constexpr, AHEAD: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
    PHASES: tl.constexpr,
):  # fmt: skip
    """Logits of one sequence's next token; its key and value go to the cache. PHASES: which of them this launch does;
    where not all, a launch is one phase of one layer, and launches follow each other instead of meeting."""
    FUSED: tl.constexpr = PHASES == 127
    Q: tl.constexpr = HEADS * GROUP * D
    QKV: tl.constexpr = HEADS * (GROUP + 2) * D
    S_PAD: tl.constexpr = triton.next_power_of_2(SPLITS)
    kind = stream.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    row, position = tl.load(packed + at_row).to(tl.int64), tl.load(packed + at_position)
    slot, length = tl.load(packed + at_slot).to(tl.int64), tl.load(packed + at_length)
    angle = tl.load(packed + at_angle).to(tl.int64) * (D // 2) + tl.arange(0, D // 2)
    c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    start = embedding + tl.load(tokens + row * tokens_stride + position).to(tl.int64) * H
    table = tables + row * table_stride

    tiles = (length + N - 1) // N
    per = tl.maximum((tiles + SPLITS - 1) // SPLITS, 1)
    if tiles <= 2 * FEW:  # so few that everybody adds them up, and nobody waits for that
        per = tl.maximum((tiles + FEW - 1) // FEW, 1)
    used = (tiles + per - 1) // per
    head, split = program % HEADS, program // HEADS
    first_at = _places(table, tl.minimum(split, SPLITS - 1) * per, length, page_stride, slot_stride, N, PAGE)

    goal = tl.full([], 0, tl.int64)
    if FUSED:  # each launch adds as much, and none ends before all have begun: so where this one began is known
        a_launch = programs.to(tl.int64) * num_layers * 6
        goal = _seen(counter)
        goal = goal - goal % a_launch
    k_H = tl.arange(0, H_PAD)
    k_S = program * SLICE + tl.arange(0, SLICE)
    for layer in range(first_layer, last_layer):
        row_of = layers + layer * 8
        w_qkv, w_out = _pointer(row_of, 0, embedding), _pointer(row_of, 1, embedding)
        w_up, w_down = _pointer(row_of, 2, embedding), _pointer(row_of, 3, embedding)
        norm_1, norm_2 = _pointer(row_of, 4, embedding), _pointer(row_of, 5, embedding)
        q_weight, k_weight = _pointer(row_of, 6, embedding), _pointer(row_of, 7, embedding)
        cache = blocks + layer * layer_stride.to(tl.int64) + head.to(tl.int64) * head_stride
        if PHASES & 1:
            units = (QKV + R_H - 1) // R_H
            w_a, w_b, w_c, w_d = _begin(w_qkv, units, QKV, H, H_PAD, R_H)
            norm = tl.load(norm_1 + k_H, mask=k_H < H, other=0.0)
            _wait(counter, goal, FUSED)
            x_H = _read(_either(layer == 0, start, stream), H, H_PAD)
            x_H = _normed(x_H, norm, eps, kind, H)
            _product(w_qkv, w_a, w_b, w_c, w_d, x_H, stream, qkv, QKV, units, H, H_PAD, R_H, P_H, False, False, RUN)
            _arrive(counter, FUSED)
            _ahead(w_out, (H + R_Q - 1) // R_Q, Q, R_Q, AHEAD)
            goal += programs
        if PHASES & 2:
            ka, kb, v = _keys(cache, first_at, kv_stride, D)
            _wait(counter, goal, FUSED)
            if split < SPLITS:
                _attend(qkv, cache, q_weight, k_weight, table, first_at, ka, kb, v, c, s, partial, peaks, slot, length,
                        head, split, per, tiles, qk_eps, scale, page_stride, kv_stride, slot_stride,
                        NORM, HEADS, GROUP, D, M, N, PAGE, PRECISION)  # fmt: skip
            _arrive(counter, FUSED)
            _ahead(w_up, (2 * F + R_U - 1) // R_U, H, R_U, AHEAD)
            goal += programs
        if PHASES & 4:
            if used > FEW:
                _wait(counter, goal, FUSED)
                tl.store(mixed + k_S, _attended(partial, peaks, k_S, Q, used, HEADS * GROUP, D, S_PAD).to(kind),
                         mask=k_S < Q)  # fmt: skip
            _arrive(counter, FUSED)
            goal += programs
        if PHASES & 8:
            units = (H + R_Q - 1) // R_Q
            before = _either(layer == 0, start, stream)
            w_a, w_b, w_c, w_d = _begin(w_out, units, H, Q, Q_PAD, R_Q)
            _wait(counter, goal, FUSED)
            if used > FEW:
                x_Q = _read(mixed, Q, Q_PAD)
            else:
                x_Q = _all_attended(partial, peaks, used, HEADS * GROUP, D, FEW, Q_PAD).to(kind).to(tl.float32)
            _product(w_out, w_a, w_b, w_c, w_d, x_Q, before, middle, H, units, Q, Q_PAD, R_Q, P_Q, False, True, RUN)
            _arrive(counter, FUSED)
            goal += programs
        if PHASES & 16:
            units = (2 * F + R_U - 1) // R_U
            w_a, w_b, w_c, w_d = _begin(w_up, units, 2 * F, H, H_PAD, R_U)
            norm = tl.load(norm_2 + k_H, mask=k_H < H, other=0.0)
            _wait(counter, goal, FUSED)
            x_H = _normed(_read(middle, H, H_PAD), norm, eps, kind, H)
            _product(w_up, w_a, w_b, w_c, w_d, x_H, stream, inner, 2 * F, units, H, H_PAD, R_U, P_H, True, False, RUN)
            _arrive(counter, FUSED)
            _ahead(w_down, (H + R_F - 1) // R_F, F, R_F, AHEAD)
            goal += programs
        if PHASES & 32:
            units = (H + R_F - 1) // R_F
            w_a, w_b, w_c, w_d = _begin(w_down, units, H, F, F_PAD, R_F)
            _wait(counter, goal, FUSED)
            x_F = _read(inner, F, F_PAD)
            _product(w_down, w_a, w_b, w_c, w_d, x_F, middle, stream, H, units, F, F_PAD, R_F, P_F, False, True, RUN)
            _arrive(counter, FUSED)
            if FUSED:  # of the next layer, or of the output
                if layer + 1 < last_layer:
                    _ahead(_pointer(row_of, 8, embedding), (QKV + R_H - 1) // R_H, H, R_H, AHEAD)
                else:
                    _ahead(output, (vocab + R_U - 1) // R_U, H, R_U, AHEAD)
            goal += programs
    if PHASES & 64:
        units = (vocab + R_U - 1) // R_U
        w_a, w_b, w_c, w_d = _begin(output, units, vocab, H, H_PAD, R_U)
        norm = tl.load(last_norm + k_H, mask=k_H < H, other=0.0)
        _wait(counter, goal, FUSED)
        x_H = _normed(_read(stream, H, H_PAD), norm, eps, kind, H)
        _product(output, w_a, w_b, w_c, w_d, x_H, stream, logits, vocab, units, H, H_PAD, R_U, P_H, False, False, RUN)
