"""Device code of the skinny product for AMD: y = x · Wᵀ (+ residual), few rows of x, one launch."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def skinny_gemv_kernel(
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
    RESIDUAL: tl.constexpr,
):
    """y[m, n] = Σ_k x[m, k] · w[n, k] (+ residual[m, n]), ROWS rows of w a workgroup, in float32, one rounding.

    x (M, K), w (N, K), y and residual (M, N): bf16, contiguous, aligned to 16 bytes. A lane takes 8 values of each row
    from k = 8·lane on of every 8·THREADS, by which K divides, as N does by ROWS. MP is M rounded up to a power of two.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    BK: tl.constexpr = THREADS * 8
    k = tl.arange(0, BK)
    m = tl.arange(0, MP)
    w_at = w + rows.to(tl.int64)[None, :, None] * K + k[None, None, :]
    x_at = x + m[:, None, None] * K + k[None, None, :]
    token_in = (m < M)[:, None, None]
    acc = tl.zeros((MP, ROWS, THREADS), tl.float32)
    for start in range(0, K, BK):
        part = tl.load(w_at + start)
        values = tl.load(x_at + start) if M == MP else tl.load(x_at + start, mask=token_in, other=0.0)
        product = part.to(tl.float32) * values.to(tl.float32)
        acc += tl.sum(tl.reshape(product, (MP, ROWS, THREADS, 8)), 3)
    total = tl.sum(acc, 2)
    at = m.to(tl.int64)[:, None] * N + rows[None, :]
    stored = (m < M)[:, None] & (rows >= 0)[None, :]
    if RESIDUAL:
        total += tl.load(residual + at, mask=stored, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=stored)
