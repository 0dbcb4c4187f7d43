# mypy: ignore-errors
"""Tensor-core kernel of `cute_mma`: y = x @ W.T (+ residual) for at most 16 rows of x, in one launch.

A cluster of `split` CTAs computes tiles of `rows` weight rows; each CTA takes its part of K, and each warp of a CTA its
chunks of that part. A warp is its own pipeline: it stages its weights into its own ring of shared-memory slots, several
chunks ahead and across tiles, multiplies them, and refills each slot as soon as it has read it. Its part of x stays in
registers for all tiles. At the end of a tile the warps' partial sums meet in shared memory and are added in ascending
warp order, then those of the CTAs in ascending rank, each CTA completing its share of the rows.

Weights are the M side of mma.m16n8k16, tokens the N side. Both operands take k in the same permuted order: lane (g, t)
holds k = 8t … 8t+7 of every 32, so that one 16-byte load per row or token feeds two products without a shuffle.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, Uint64, cute
from cutlass.cute import arch

MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
    "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
)
CP_ASYNC = "cp.async.cg.shared.global.L2::cache_hint [{$r0}], [{$r1}], 16, {$r2};"
#: x is read past L1: with programmatic launch this kernel may have begun before x was written.
LOAD_X = "ld.global.cg.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
LOAD_SHARED = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
EVICT_FIRST = "createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;"


def load16(code, address):
    """Four 32-bit words from a 16-byte aligned address."""
    return arch.inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[address])


def load_float(address):
    """A float32 from shared memory."""
    return arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def opaque64(value):
    """The same value, of which the compiler knows nothing: it would keep every address derived from it in registers."""
    return arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[value])


def opaque32(value):
    """As `opaque64`, for addresses in shared memory."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


class MmaKernel:
    """The kernel for one K and one set of parameters (`cute_parameters.MmaParameters`)."""

    def __init__(self, k, parameters, *, token_tiles, residual, pdl, even):
        self.k, self.p = k, parameters
        self.token_tiles, self.residual, self.pdl, self.even = token_tiles, residual, pdl, even
        self.shared = parameters.shared(token_tiles)
        self.turns = parameters.turns(k)
        self.tokens = 8 * token_tiles
        #: Independent accumulators of one product: enough for four products to be under way.
        self.halves = 2 if parameters.row_tiles * token_tiles < 4 else 1
        self.own_rows = parameters.rows // parameters.split

    @cute.jit
    def __call__(self, x: Int64, w: Int64, r: Int64, out: Int64, m: Int32, n: Int32, grid: Int32, stream):
        self.kernel(x, w, r, out, m, n).launch(
            grid=[grid, 1, 1],
            block=[self.p.threads, 1, 1],
            cluster=[self.p.split, 1, 1] if self.p.split > 1 else None,
            smem=self.shared.total,
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=self.p.resident(self.k, self.token_tiles),
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, x: Int64, w: Int64, r: Int64, out: Int64, m: Int32, n: Int32):
        p, layout = self.p, self.shared
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        rank, first, step = block % p.split, block // p.split, blocks // p.split
        warp, lane = arch.make_warp_uniform(thread // 32), thread % 32
        base = arch.get_dyn_smem(Uint8, 128).toint()
        slots = base + layout.slots + warp * (p.stages * layout.slot)
        policy = arch.inline_ptx(EVICT_FIRST, write_only_types=[Uint64])
        tiles = (n + (p.rows - 1)) // p.rows
        # Chunk number `turn` of this warp begins at column + turn · warps · chunk, in bytes.
        column = Int64((rank * (self.turns * p.warps) + warp) * (p.chunk * 2))

        if cutlass.const_expr(p.split > 1):
            arch.cluster_arrive()
        words = []
        if cutlass.const_expr(not self.pdl):
            words = self.load_x(x + column, m, lane)
        copied = self.place(lane)
        source = w + column + copied[0]
        for s in cutlass.range_constexpr(p.stages):
            self.stage(
                source, n, first + s // self.turns * step, s % self.turns, copied, slots + s * layout.slot, policy
            )
        if cutlass.const_expr(self.pdl):
            arch.griddepcontrol_launch_dependents()
            arch.griddepcontrol_wait()
            words = self.load_x(x + column, m, lane)
        if cutlass.const_expr(p.split > 1):
            arch.cluster_wait()

        position, parity = Int32(0), Int32(0)
        for tile in cutlass.range(first, tiles, step, unroll=1):
            kept = self.load_residual(r, m, n, tile, thread, rank)
            acc = self.zeros()
            for j in cutlass.range_constexpr(self.turns):
                slot = j % p.stages if self.turns % p.stages == 0 else (position + j) % p.stages
                address = slots + slot * layout.slot
                arch.cp_async_wait_group(p.stages - 1)
                arch.sync_warp()
                acc = self.multiply(acc, address, words[j], lane)
                arch.sync_warp()
                refill = j + p.stages
                self.stage(source, n, tile + refill // self.turns * step, refill % self.turns, copied, address, policy)
            position = (position + self.turns) % p.stages
            self.add_warps(acc, base, warp, lane)
            self.finish(kept, base, base + layout.exchange + parity * layout.exchanged, out, m, n, tile, thread, rank)
            parity = parity ^ 1

    # Weights into shared memory.

    def place(self, lane):
        """Where this lane's copies begin: bytes into the weights, row of the tile, bytes into a slot for each parity.

        Odd rows lie with their 64-byte halves swapped, against bank conflicts.
        """
        pitch, pieces = self.p.chunk * 2, self.p.chunk // 8
        if pieces >= 32:
            return Int64(lane * 16), Int32(0), (lane * 16, (lane ^ 4) * 16)
        row, piece = lane // pieces, lane % pieces
        target = row * pitch + (piece ^ (row % 2 * 4)) * 16
        return Int64(row * (self.k * 2) + piece * 16), row, (target, target)

    def stage(self, source, n, tile, turn, copied, address, policy):
        """Begin to copy this warp's chunk number `turn` of a tile.

        Rows beyond N are left as they are, for no stored sum has read them; all of them for tiles beyond the last.
        """
        p, pitch = self.p, self.p.chunk * 2
        _, row, targets = copied
        start = opaque64(source + Int64(tile) * (p.rows * self.k * 2) + turn * p.warps * pitch)
        target = opaque32(address + targets[0])
        other = opaque32(address + targets[1]) if p.chunk >= 256 else target
        left = n - tile * p.rows - row
        exists = left > 0
        together = max(1, 32 // (p.chunk // 8))
        for i in range(0, p.rows, together):
            for part in range(0, pitch, 512):
                arch.inline_ptx(
                    CP_ASYNC,
                    read_only_args=[
                        (other if i % 2 else target) + (i * pitch + part),
                        start + (i * self.k * 2 + part),
                        policy,
                    ],
                    predicate=exists if self.even else left > i,
                )
        arch.cp_async_commit_group()

    # Products.

    def load_x(self, x, m, lane):
        """This lane's words of x: [turn][step of 32][token tile][4]; rows beyond M repeat the last, to be dropped."""
        p = self.p
        rows = [
            x + Int64(cutlass.min(lane // 4 + i * 8, m - 1)) * (self.k * 2) + Int64(lane % 4 * 16)
            for i in range(self.token_tiles)
        ]
        return [
            [[load16(LOAD_X, row + (j * p.warps * p.chunk * 2 + s * 64)) for row in rows] for s in range(p.chunk // 32)]
            for j in range(self.turns)
        ]

    def zeros(self):
        """Accumulators: [row tile · token tile][half of a k step][4]."""
        return [[[Float32(0.0)] * 4 for _ in range(self.halves)] for _ in range(self.p.row_tiles * self.token_tiles)]

    def multiply(self, acc, address, x, lane):
        """Add the products of one chunk."""
        p = self.p
        result = [[list(half) for half in tile] for tile in acc]
        g, t = lane // 4, lane % 4
        # Rows g and g + 8 have the same parity; an odd row's step s lies where an even row's step s ^ 1 would.
        swapped = g % 2 * 64
        even = opaque32(address + g * (p.chunk * 2) + t * 16 + swapped)
        odd = opaque32(even - 2 * swapped)
        for s in range(p.chunk // 32):
            start = (odd if s % 2 else even) + s * 64
            for i in range(p.row_tiles):
                low = load16(LOAD_SHARED, start + i * 16 * (p.chunk * 2))
                high = [Uint32(0)] * 4
                if p.rows > 8:
                    high = load16(LOAD_SHARED, start + (i * 16 + 8) * (p.chunk * 2))
                for token_tile in range(self.token_tiles):
                    tile = result[i * self.token_tiles + token_tile]
                    words = x[s][token_tile]
                    for half in range(2):
                        a, b = 2 * half, 2 * half + 1
                        operands = [low[a], high[a], low[b], high[b], words[a], words[b], *tile[half % self.halves]]
                        tile[half % self.halves] = list(
                            arch.inline_ptx(MMA, write_only_types=[Float32] * 4, read_only_args=operands)
                        )
        return result

    # Sums.

    def add_warps(self, acc, partial, warp, lane):
        """Leave each warp's sums in shared memory, [warp][token][row]."""
        p, pitch = self.p, self.shared.token_pitch
        mine = partial + warp * (self.tokens * pitch * 4)
        g, t = lane // 4, lane % 4
        for i in range(p.row_tiles):
            for j in range(self.token_tiles):
                halves = acc[i * self.token_tiles + j]
                for c in range(4 if p.rows > 8 else 2):
                    row, token = g + (i * 16 + (c // 2) * 8), t * 2 + (c % 2 + j * 8)
                    total = halves[0][c] + halves[1][c] if self.halves == 2 else halves[0][c]
                    arch.inline_ptx(
                        "st.shared.f32 [{$r0}], {$r1};", read_only_args=[mine + (token * pitch + row) * 4, total]
                    )
        arch.sync_threads()

    def outputs(self, thread, rows):
        """(token, row, exists) of this thread's elements of a block of tokens · rows."""
        count = self.tokens * rows
        for q in range(-(-count // self.p.threads)):
            index = thread + q * self.p.threads
            exists = index < count
            if (q + 1) * self.p.threads > count:
                index = cutlass.min(index, count - 1)
            yield index // rows, index % rows, exists

    def located(self, m, n, tile, thread, rank):
        """(token, row, offset in y, exists) of the elements of y that this thread completes."""
        for token, row, counted in self.outputs(thread, self.own_rows):
            column = tile * self.p.rows + rank * self.own_rows + row
            exists = cutlass.and_(counted, cutlass.and_(token < m, column < n))
            yield token, row, Int64(token) * Int64(n) * 2 + Int64(column) * 2, exists

    def load_residual(self, r, m, n, tile, thread, rank):
        """This thread's residual values as float32, loaded before the products."""
        kept = []
        for _, _, offset, exists in self.located(m, n, tile, thread, rank) if self.residual else ():
            bits = arch.inline_ptx(
                "ld.global.cg.u16 {$w0}, [{$r0}];",
                write_only_types=[Uint16],
                read_only_args=[cutlass.select_(exists, r + offset, r)],
            )
            word = Uint32(bits) << 16
            kept.append(arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word]))
        return kept

    def sum_warps(self, partial, token, row):
        """One element's sum over the warps, in ascending order."""
        pitch = self.shared.token_pitch
        total = Float32(0.0)
        for v in range(self.p.warps):
            total = total + load_float(partial + (token * pitch + row) * 4 + v * (self.tokens * pitch * 4))
        return total

    def finish(self, kept, partial, exchange, out, m, n, tile, thread, rank):
        """Add the sums of warps and CTAs and the residual; round once and store."""
        p = self.p
        if p.split > 1:
            # Every CTA hands each of the others that one's rows: [rank of the sender][token][row].
            for token, row, _ in self.outputs(thread, p.rows):
                inside = (rank * self.tokens + token) * self.own_rows + row % self.own_rows
                arch.inline_ptx(
                    "{\n.reg .u32 far;\nmapa.shared::cluster.u32 far, {$r0}, {$r1};\n"
                    "st.shared::cluster.f32 [far], {$r2};\n}",
                    read_only_args=[
                        exchange + inside * 4,
                        row // self.own_rows,
                        self.sum_warps(partial, token, row),
                    ],
                )
            arch.cluster_arrive()
            arch.cluster_wait()
        for q, (token, row, offset, exists) in enumerate(self.located(m, n, tile, thread, rank)):
            if p.split > 1:
                total = Float32(0.0)
                for sender in range(p.split):
                    total = total + load_float(exchange + ((sender * self.tokens + token) * self.own_rows + row) * 4)
            else:
                total = self.sum_warps(partial, token, row)
            if self.residual:
                total = total + kept[q]
            rounded = arch.inline_ptx(
                "cvt.rn.bf16.f32 {$w0}, {$r0};", write_only_types=[Uint16], read_only_args=[total]
            )
            arch.inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[out + offset, rounded], predicate=exists)
        if p.split == 1:
            arch.sync_threads()  # the next tile's sums go where these were read
