# mypy: ignore-errors
"""CUDA-core kernel of `cute_gemv`: y = x @ W.T (+ residual) for a few rows of x, in one launch.

A CTA computes `outputs` weight rows. Thread t reads the 16 bytes at k = 8·(t + i·threads) of every row in step i; the
weights of `ahead` steps are in flight. Each product is a float32 fused multiply-add; the threads' sums meet by shuffles
within a warp, then in shared memory, and are added in ascending warp order.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, Uint64, cute
from cutlass.cute import arch

EVICT_FIRST = "createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;"
STREAM = "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}], {$r1};"
LOAD_X = "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
#: Past L1: with programmatic launch this kernel may have begun before x was written.
LOAD_NEW_X = "ld.global.cg.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"


def bits_to_float(word):
    """The float32 of these 32 bits."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def unpack(words):
    """Eight bf16 in four words, as float32."""
    return [bits_to_float(v) for word in words for v in (word << 16, word & Uint32(0xFFFF0000))]


class GemvKernel:
    """The kernel for one M, one K and one set of parameters (`cute_parameters.GemvParameters`)."""

    def __init__(self, k, parameters, *, m, residual, pdl):
        self.k, self.p, self.m = k, parameters, m
        self.residual, self.pdl = residual, pdl
        self.warps = parameters.threads // 32
        self.steps = k // (8 * parameters.threads)
        self.sums = parameters.outputs * m

    @cute.jit
    def __call__(self, x: Int64, w: Int64, r: Int64, out: Int64, m: Int32, n: Int32, grid: Int32, stream):  # noqa: ARG002 - M is compiled in
        self.kernel(x, w, r, out, n).launch(
            grid=[grid, 1, 1],
            block=[self.p.threads, 1, 1],
            smem=self.p.shared_bytes(self.m),
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, x: Int64, w: Int64, r: Int64, out: Int64, n: Int32):
        p = self.p
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        policy = arch.inline_ptx(EVICT_FIRST, write_only_types=[Uint64])
        rows = [
            w + Int64(cutlass.min(block * p.outputs + o, n - 1)) * (self.k * 2) + Int64(thread * 16)
            for o in range(p.outputs)
        ]
        tokens = [x + Int64(i * self.k * 2) + Int64(thread * 16) for i in range(self.m)]
        weights = [self.load_weights(rows, i, policy) for i in range(min(p.ahead, self.steps))]
        if cutlass.const_expr(self.pdl):
            arch.griddepcontrol_launch_dependents()
            arch.griddepcontrol_wait()
        activations = [self.load_x(tokens, 0)]
        acc = [[Float32(0.0)] * self.m for _ in range(p.outputs)]
        for i in cutlass.range_constexpr(self.steps):
            if cutlass.const_expr(i + p.ahead < self.steps):
                weights.append(self.load_weights(rows, i + p.ahead, policy))
            if cutlass.const_expr(i + 1 < self.steps):
                activations.append(self.load_x(tokens, i + 1))
            acc = self.multiply(acc, weights[i], activations[i])
        partial = arch.get_dyn_smem(Uint8, 16).toint()
        self.reduce(acc, partial, thread)
        arch.sync_threads()
        self.store(partial, r, out, n, block, thread)

    def load_weights(self, rows, i, policy):
        """This thread's words of every row in step i."""
        offset = i * self.p.threads * 16
        return [
            arch.inline_ptx(STREAM, write_only_types=[Uint32] * 4, read_only_args=[row + offset, policy])
            for row in rows
        ]

    def load_x(self, tokens, i):
        """This thread's words of every token in step i."""
        offset = i * self.p.threads * 16
        return [
            arch.inline_ptx(
                LOAD_NEW_X if self.pdl else LOAD_X, write_only_types=[Uint32] * 4, read_only_args=[token + offset]
            )
            for token in tokens
        ]

    def multiply(self, acc, weights, activations):
        """Add the products of one step."""
        result = [list(row) for row in acc]
        rows = [unpack(words) for words in weights]
        for i, words in enumerate(activations):
            x = unpack(words)
            for o, row in enumerate(rows):
                total = result[o][i]
                for v in range(8):
                    total = arch.inline_ptx(
                        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
                        write_only_types=[Float32],
                        read_only_args=[row[v], x[v], total],
                    )
                result[o][i] = total
        return result

    def reduce(self, acc, partial, thread):
        """Sum over a warp's lanes; its lane 0 leaves the sums in shared memory, [warp][output · token]."""
        warp, lane = thread // 32, thread % 32
        for index, value in enumerate(v for row in acc for v in row):
            total = value
            for distance in (16, 8, 4, 2, 1):
                total = total + arch.shuffle_sync_bfly(total, distance)
            arch.inline_ptx(
                "st.shared.f32 [{$r0}], {$r1};",
                read_only_args=[partial + warp * (self.sums * 4) + index * 4, total],
                predicate=lane == 0,
            )

    def store(self, partial, r, out, n, block, thread):
        """Add the warps' sums in ascending order, then the residual; round once and store."""
        p = self.p
        for q in range(-(-self.sums // p.threads)):
            index = cutlass.min(thread + q * p.threads, self.sums - 1)
            output, token = index // self.m, index % self.m
            column = block * p.outputs + output
            exists = cutlass.and_(thread + q * p.threads < self.sums, column < n)
            offset = Int64(token) * Int64(n) * 2 + Int64(column) * 2
            total = Float32(0.0)
            for v in range(self.warps):
                total = total + arch.inline_ptx(
                    "ld.shared.f32 {$w0}, [{$r0}];",
                    write_only_types=[Float32],
                    read_only_args=[partial + index * 4 + v * (self.sums * 4)],
                )
            if self.residual:
                bits = arch.inline_ptx(
                    "ld.global.cg.u16 {$w0}, [{$r0}];",
                    write_only_types=[Uint16],
                    read_only_args=[cutlass.select_(exists, r + offset, r)],
                )
                total = total + bits_to_float(Uint32(bits) << 16)
            rounded = arch.inline_ptx(
                "cvt.rn.bf16.f32 {$w0}, {$r0};", write_only_types=[Uint16], read_only_args=[total]
            )
            arch.inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[out + offset, rounded], predicate=exists)
