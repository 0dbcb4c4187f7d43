"""Device code of the one-launch skinny products y = x · Wᵀ (+ residual), M ≤ 16 rows of x.

All read every weight once, add in float32 in an order that does not depend on timing, and round once. With PDL a
kernel may begin while the one before it on the stream still runs: it asks L2 for its first weights, which nobody
writes, and then waits for that kernel's end before it reads anything else.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _prefetch(w, rows, N, K, first, LINES: tl.constexpr):
    """Ask L2 for LINES lines of 128 bytes of each of this program's weight rows, from column `first` on."""
    column = tl.minimum(first + tl.arange(0, LINES) * 64, K - 64)
    at = tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [w + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def gemv_kernel(
    x,
    w,
    y,
    residual,
    N,
    K,
    M: tl.constexpr,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    THREADS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    LINES: tl.constexpr,
):
    """y[m, n] = Σ_k x[m, k] · w[n, k] (+ residual[m, n]) on the CUDA cores, ROWS rows of w a program.

    x (M, K) bf16, w (N, K) bf16, y and residual (M, N) bf16, all contiguous and aligned to 16 bytes; MP is M rounded
    up to a power of two. Thread t owns the 8 values from k = 8·t on of every 8·THREADS; EVEN: K divides by
    8·THREADS·UNROLL, and N by ROWS.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    BK: tl.constexpr = THREADS * UNROLL * 8
    k = tl.arange(0, BK)
    m = tl.arange(0, MP)
    w_at = w + rows.to(tl.int64)[None, :, None] * K + k[None, None, :]
    x_at = x + m[:, None, None] * K + k[None, None, :]
    row_in = (rows < N)[None, :, None]
    token_in = (m < M)[:, None, None]
    if PDL:
        _prefetch(w, rows, N, K, 0, LINES)
        gdc_wait()
    acc = tl.zeros((MP, ROWS, THREADS), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            part = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            inside = (k < K - start)[None, None, :]
            part = tl.load(w_at + start, mask=inside & row_in, other=0.0, eviction_policy="evict_first")
        if EVEN and M == MP:
            values = tl.load(x_at + start)
        elif EVEN:
            values = tl.load(x_at + start, mask=token_in, other=0.0)
        else:
            values = tl.load(x_at + start, mask=(k < K - start)[None, None, :] & token_in, other=0.0)
        product = part.to(tl.float32) * values.to(tl.float32)
        folded = tl.reshape(product, (MP, ROWS, UNROLL, THREADS, 8))
        acc += tl.sum(tl.sum(folded, 4), 2)
    if PDL:  # earlier, the next kernel's programs would take the place and bandwidth of this one's
        gdc_launch_dependents()
    total = tl.sum(acc, 2)
    at = m.to(tl.int64)[:, None] * N + rows[None, :]
    stored = (m < M)[:, None] & (rows < N)[None, :]
    if RESIDUAL:
        total += tl.load(residual + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)


@triton.jit
def mma_kernel(  # noqa: PLR0912 - device code
    x,
    w,
    y,
    residual,
    partials,
    counters,
    N,
    K,
    M,
    MP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    LINES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """y[m, n] = Σ_k x[m, k] · w[n, k] (+ residual[m, n]) on the tensor cores, ROWS rows of w a program.

    The rows of w are the operand's M, the tokens its N (padded to MP, 8 or 16). A step is GROUPS pieces of BK values
    of k, one piece a warp (a batched product puts its batch over the warps); their sums meet at the end. With SPLIT
    programs a tile of rows, each takes every SPLIT-th step; all write float32 partials, and the one whose count
    completes the tile adds them in the order of the programs, stores, and sets the count back to 0.

    partials (SPLIT, N / ROWS, ROWS, MP) float32, counters (N / ROWS,) int32, zero between calls; unused if SPLIT is 1.
    """
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    STEP: tl.constexpr = GROUPS * BK
    k = tl.arange(0, GROUPS)[:, None] * BK + tl.arange(0, BK)[None, :]
    m = tl.arange(0, MP)
    w_at = w + rows.to(tl.int64)[None, :, None] * K + k[:, None, :]
    x_at = x + m[None, None, :] * K + k[:, :, None]
    row_in = (rows < N)[None, :, None]
    token_in = (m < M)[None, None, :]
    if PDL:
        _prefetch(w, rows, N, K, piece * STEP, LINES)
        gdc_wait()
    acc = tl.zeros((GROUPS, ROWS, MP), tl.float32)
    for start in tl.range(piece * STEP, K, STEP * SPLIT, num_stages=STAGES):
        if EVEN:
            part = tl.load(w_at + start, eviction_policy="evict_first")
            values = tl.load(x_at + start, mask=token_in, other=0.0)
        else:
            part = tl.load(
                w_at + start, mask=(k < K - start)[:, None, :] & row_in, other=0.0, eviction_policy="evict_first"
            )
            values = tl.load(x_at + start, mask=(k < K - start)[:, :, None] & token_in, other=0.0)
        if WIDEN:  # the interpreter multiplies bf16 bit patterns
            acc += tl.dot(part.to(tl.float32), values.to(tl.float32))
        else:
            acc = tl.dot(part, values, acc)
    if PDL:
        gdc_launch_dependents()
    total = tl.sum(acc, 0)
    stored = (rows < N)[:, None] & (m < M)[None, :]
    at = m.to(tl.int64)[None, :] * N + rows[:, None]
    if SPLIT == 1:
        if RESIDUAL:
            total += tl.load(residual + at, mask=stored, other=0.0).to(tl.float32)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)
    else:
        tiles = tl.num_programs(0)
        slot = tl.arange(0, ROWS)[:, None] * MP + m[None, :]
        size: tl.constexpr = ROWS * MP
        tl.store(partials + (piece * tiles + tile) * size + slot, total, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's partials are written before the one atomic publishes them
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.zeros((ROWS, MP), tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(partials + (other * tiles + tile) * size + slot, cache_modifier=".cg")
            if RESIDUAL:
                total += tl.load(residual + at, mask=stored, other=0.0).to(tl.float32)
            tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)
            tl.store(counters + tile, 0)


@triton.jit
def _lanes(part, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, ASCENDING: tl.constexpr):
    """Return (G, 8·H, 32·C) in the order of K in which a lane's 16 bytes are its share of two m16n8k16 operands.

    part (8, G, H, C, 32) if ASCENDING, else (C, H, G, 8, 32): dimensions in the order in which Triton gives them to
    lanes, then to warps. Lane 4·i + t holds the 8 values from 8·t on of row i. Of a product of 16 values of K a lane
    holds k = 2·t + e and 2·t + 8 + e, so value 4·s + 2·h + e of the eight is taken for k = 16·s + 8·h + 2·t + e.
    """
    if ASCENDING:
        split = tl.permute(tl.reshape(part, (8, G, H, C, 4, 2, 2, 2)), (1, 2, 0, 3, 5, 6, 4, 7))
    else:
        split = tl.permute(tl.reshape(part, (C, H, G, 8, 4, 2, 2, 2)), (2, 1, 3, 0, 5, 6, 4, 7))
    return tl.reshape(split, (G, H * 8, C * 32))


@triton.jit
def fragment_kernel(  # noqa: PLR0912 - device code
    x,
    w,
    y,
    residual,
    N,
    K,
    M,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    LINES: tl.constexpr,
    WIDEN: tl.constexpr,
    ASCENDING: tl.constexpr,
):
    """y[m, n] = Σ_k x[m, k] · w[n, k] (+ residual[m, n]) on the tensor cores, straight from global memory.

    ROWS rows of w and TOKENS (8 or 16) rows of x a program; 8 rows of w are the right operand, more are the left one.
    In a step each warp takes CHUNKS pieces of 32 values of k: a lane's 16-byte loads are its operands, in an order of k
    that is the same for w and x, so nothing goes through shared memory before the warps' sums meet. AHEAD: the loads
    of the next step are sent before this one is computed.
    EVEN: K divides by 32·CHUNKS·WARPS, N by ROWS.
    """
    H: tl.constexpr = ROWS // 8
    T: tl.constexpr = TOKENS // 8
    STEP: tl.constexpr = 32 * CHUNKS * WARPS
    row0 = tl.program_id(0) * ROWS
    if ASCENDING:
        lo = tl.arange(0, 8)[:, None, None, None, None]
        g = tl.arange(0, WARPS)[None, :, None, None, None]
        h = tl.arange(0, H)[None, None, :, None, None]
        t = tl.arange(0, T)[None, None, :, None, None]
        c = tl.arange(0, CHUNKS)[None, None, None, :, None]
    else:
        lo = tl.arange(0, 8)[None, None, None, :, None]
        g = tl.arange(0, WARPS)[None, None, :, None, None]
        h = tl.arange(0, H)[None, :, None, None, None]
        t = tl.arange(0, T)[None, :, None, None, None]
        c = tl.arange(0, CHUNKS)[:, None, None, None, None]
    chunk = (g * CHUNKS + c) * 32
    k = chunk + tl.arange(0, 32)[None, None, None, None, :]
    row = row0 + h * 8 + lo
    token = t * 8 + lo
    w_at = w + row.to(tl.int64) * K + k
    x_at = x + token * K + k
    if PDL:
        _prefetch(w, row0 + tl.arange(0, ROWS), N, K, 0, LINES)
        gdc_wait()
    SWAPPED: tl.constexpr = ROWS == 8
    acc = tl.zeros((WARPS, TOKENS, ROWS) if SWAPPED else (WARPS, ROWS, TOKENS), tl.float32)
    if AHEAD:
        inside = (chunk < K) & (row < N)
        part = tl.load(w_at, mask=inside, other=0.0, eviction_policy="evict_first")
        values = tl.load(x_at, mask=(chunk < K) & (token < M), other=0.0)
    for start in range(0, K, STEP):
        if AHEAD:
            part_now = part
            values_now = values
            left = chunk < K - start - STEP
            part = tl.load(w_at + start + STEP, mask=left & (row < N), other=0.0, eviction_policy="evict_first")
            values = tl.load(x_at + start + STEP, mask=left & (token < M), other=0.0)
        else:
            if EVEN:
                part_now = tl.load(w_at + start, eviction_policy="evict_first")
            else:
                inside = (chunk < K - start) & (row < N)
                part_now = tl.load(w_at + start, mask=inside, other=0.0, eviction_policy="evict_first")
            values_now = tl.load(x_at + start, mask=(chunk < K - start) & (token < M), other=0.0)
        a = _lanes(part_now, CHUNKS, H, WARPS, ASCENDING)
        b = _lanes(values_now, CHUNKS, T, WARPS, ASCENDING)
        if SWAPPED:
            a, b = b, a
        b = tl.permute(b, (0, 2, 1))
        if WIDEN:
            acc += tl.dot(a.to(tl.float32), b.to(tl.float32))
        else:
            acc = tl.dot(a, b, acc)
    if PDL:
        gdc_launch_dependents()
    total = tl.sum(acc, 0)
    if SWAPPED:
        total = tl.trans(total)
    rows = row0 + tl.arange(0, ROWS)
    m = tl.arange(0, TOKENS)
    stored = (rows < N)[:, None] & (m < M)[None, :]
    at = m.to(tl.int64)[None, :] * N + rows[:, None]
    if RESIDUAL:
        total += tl.load(residual + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)
