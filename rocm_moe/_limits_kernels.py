# mypy: ignore-errors
"""Device code that keeps one unit of a GPU busy: memory, matrix cores, byte permutes, packed multiply-adds.

Each kernel stores a result that depends on every iteration, so that the compiler keeps the work; how many instructions
an iteration really has is read from the compiled code, not assumed here.
"""

import triton
import triton.language as tl

from rocm_moe.triton_compat import amd_perm


@triton.jit
def stream_kernel(source, out, blocks_per_program, BLOCK: tl.constexpr):
    """Read blocks_per_program blocks of BLOCK int32 words, program p every programs-th from p on."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(blocks_per_program):
        block = (program + i * programs).to(tl.int64)
        total ^= tl.load(source + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program * BLOCK + tl.arange(0, BLOCK), total)


@triton.jit
def matrix_kernel(source, out, iterations, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Do iterations × 4 products of [SIZE, DEPTH] and [DEPTH, SIZE] from registers, four independent sums."""
    rows = tl.arange(0, SIZE)
    depth = tl.arange(0, DEPTH)
    a = tl.load(source + rows[:, None] * DEPTH + depth[None, :])
    b = tl.load(source + depth[:, None] * SIZE + rows[None, :])
    s0 = tl.zeros((SIZE, SIZE), tl.float32)
    s1 = s0 + 1.0
    s2 = s0 + 2.0
    s3 = s0 + 3.0
    for _ in range(iterations):
        s0 = tl.dot(a, b, s0)
        s1 = tl.dot(a, b, s1)
        s2 = tl.dot(a, b, s2)
        s3 = tl.dot(a, b, s3)
    tl.store(out + rows[:, None] * SIZE + rows[None, :], s0 + s1 + s2 + s3)


@triton.jit
def _permute(x, selector, PERM: tl.constexpr):
    if PERM:  # noqa: SIM108 - decided when Triton compiles
        x = amd_perm(x, selector, x)
    else:
        x = (x ^ selector) + x
    return x


@triton.jit
def permute_kernel(source, out, iterations, BLOCK: tl.constexpr, PERM: tl.constexpr):
    """Do iterations × 8 byte permutes (xor and add where PERM is false) a lane, in four chains."""
    lanes = tl.arange(0, BLOCK)
    selector = tl.load(source + lanes)
    w0 = selector + 1
    w1 = selector + 2
    w2 = selector + 3
    w3 = selector + 4
    for _ in range(iterations):
        for _unrolled in tl.static_range(2):
            w0 = _permute(w0, selector, PERM)
            w1 = _permute(w1, selector, PERM)
            w2 = _permute(w2, selector, PERM)
            w3 = _permute(w3, selector, PERM)
    tl.store(out + tl.program_id(0) * BLOCK + lanes, w0 ^ w1 ^ w2 ^ w3)


@triton.jit
def fma_kernel(source, out, iterations, BLOCK: tl.constexpr):
    """Do iterations × 2 multiply-adds for each of BLOCK numbers; several a lane, so that they can be packed."""
    lanes = tl.arange(0, BLOCK)
    factor = tl.load(source + lanes)
    x = factor + 1.0
    for _ in range(iterations):
        x = tl.fma(x, factor, factor)
        x = tl.fma(x, factor, factor)
    tl.store(out + tl.program_id(0) * BLOCK + lanes, x)


@triton.jit
def overlap_kernel(
    source, words, out, iterations, SIZE: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, PERM: tl.constexpr
):
    """The matrix products and the permutes of an iteration together: independent, so they could overlap."""
    rows = tl.arange(0, SIZE)
    depth = tl.arange(0, DEPTH)
    lanes = tl.arange(0, BLOCK)
    a = tl.load(source + rows[:, None] * DEPTH + depth[None, :])
    b = tl.load(source + depth[:, None] * SIZE + rows[None, :])
    s0 = tl.zeros((SIZE, SIZE), tl.float32)
    s1 = s0 + 1.0
    selector = tl.load(words + lanes)
    w0 = selector + 1
    w1 = selector + 2
    w2 = selector + 3
    w3 = selector + 4
    for _ in range(iterations):
        s0 = tl.dot(a, b, s0)
        for _unrolled in tl.static_range(4):
            w0 = _permute(w0, selector, PERM)
            w1 = _permute(w1, selector, PERM)
            w2 = _permute(w2, selector, PERM)
            w3 = _permute(w3, selector, PERM)
        s1 = tl.dot(a, b, s1)
    tl.store(out + rows[:, None] * SIZE + rows[None, :], s0 + s1)
    tl.store(words + BLOCK + tl.program_id(0) * BLOCK + lanes, w0 ^ w1 ^ w2 ^ w3)


@triton.jit
def chase_kernel(links, out, hops):
    """Follow `hops` links, each load's address being the previous load's value."""
    place = tl.load(links)
    for _ in range(hops):
        place = tl.load(links + place)
    tl.store(out, place)


@triton.jit
def empty_kernel(out):
    """Nothing but a guard that never holds: the cost of a launch."""
    if tl.program_id(0) > 1_000_000:
        tl.store(out, 0)
