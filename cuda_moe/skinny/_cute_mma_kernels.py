# mypy: ignore-errors
"""Tensor-core kernel of `cute_mma`: y = x @ W.T (+ residual) for at most 16 rows of x, in one launch.

A CTA computes tiles of `rows` weight rows. K is cut into chunks; warp w owns chunks w, w + warps, … of every tile and
is its own pipeline: it stages its weights into its own ring of shared-memory slots, several chunks ahead and across
tiles, multiplies them, and refills each slot as soon as it has read it. At the end of a tile the warps' partial sums
meet in shared memory and are added in ascending warp order.

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
BULK = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};"
)
CP_ASYNC = "cp.async.cg.shared.global.L2::cache_hint [{$r0}], [{$r1}], 16, {$r2};"
#: Waits for the phase of parity r1, unless r2 is 0.
WAIT = """{
.reg .pred done;
setp.eq.u32 done, {$r2}, 0;
@done bra over;
again:
mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1};
@!done bra again;
over:
}"""
#: x is read past L1: with programmatic launch this kernel may have begun before x was written.
LOAD_X = "ld.global.cg.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
LOAD_SHARED = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
EVICT_FIRST = "createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;"


def load16(code, address):
    """Four 32-bit words from a 16-byte aligned address."""
    return arch.inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[address])


def choose(condition, yes, no):
    """`yes` where the condition holds, else `no`; without a branch."""
    return cutlass.select_(condition, yes, no)


class MmaKernel:
    """The kernel for one K and one set of parameters (`cute_parameters.MmaParameters`)."""

    def __init__(self, k, parameters, *, token_tiles, residual, pdl):
        self.k, self.p = k, parameters
        self.token_tiles, self.residual, self.pdl = token_tiles, residual, pdl
        self.shared = parameters.shared(token_tiles)
        self.chunks = k // parameters.chunk
        self.turns = -(-self.chunks // parameters.warps)
        self.tokens = 8 * token_tiles
        self.sums = -(-self.tokens * parameters.rows // parameters.threads)

    @cute.jit
    def __call__(self, x: Int64, w: Int64, r: Int64, out: Int64, m: Int32, n: Int32, grid: Int32, stream):
        self.kernel(x, w, r, out, m, n).launch(
            grid=[grid, 1, 1],
            block=[self.p.threads, 1, 1],
            smem=self.shared.total,
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, x: Int64, w: Int64, r: Int64, out: Int64, m: Int32, n: Int32):
        p, layout = self.p, self.shared
        thread, _, _ = arch.thread_idx()
        first, _, _ = arch.block_idx()
        step, _, _ = arch.grid_dim()
        warp, lane = arch.make_warp_uniform(thread // 32), thread % 32
        base = arch.get_dyn_smem(Uint8, 128).toint()
        slots = base + layout.slots + warp * (p.stages * layout.slot)
        barriers = base + layout.barriers + warp * (p.stages * 8)
        policy = arch.inline_ptx(EVICT_FIRST, write_only_types=[Uint64])
        tiles = (n + (p.rows - 1)) // p.rows
        mine = (Int32(self.chunks + p.warps - 1) - warp) // p.warps

        self.start_barriers(barriers, lane)
        p_tile, p_turn = first, Int32(0)
        for s in cutlass.range_constexpr(p.stages):
            self.stage(w, n, p_tile, tiles, p_turn, warp, lane, slots + s * layout.slot, barriers + s * 8, policy)
            p_turn, p_tile = self.advance(p_turn, p_tile, mine, step)
        if cutlass.const_expr(self.pdl):
            arch.griddepcontrol_launch_dependents()
            arch.griddepcontrol_wait()

        rows_of_x = self.rows_of_x(x, m, lane)
        fragment = (lane // 4) * layout.pitch + (lane % 4) * 16
        position, parity = Int32(0), Int32(0)
        for tile in cutlass.range(first, tiles, step, unroll=1):
            kept = self.load_residual(r, m, n, tile, thread)
            ahead = [self.load_x(rows_of_x, j, warp) for j in range(min(p.x_ahead, self.turns))]
            acc = self.zeros()
            for j in cutlass.range_constexpr(self.turns):
                if cutlass.const_expr(j + p.x_ahead < self.turns):
                    ahead.append(self.load_x(rows_of_x, j + p.x_ahead, warp))
                slot = position % p.stages
                address, bar = slots + slot * layout.slot, barriers + slot * 8
                live = self.live(j, warp)
                self.wait(bar, (position // p.stages) & 1, live)
                acc = self.multiply(acc, address + fragment, ahead[j], live)
                arch.sync_warp()
                self.stage(w, n, self.only(live, p_tile, tiles), tiles, p_turn, warp, lane, address, bar, policy)
                next_turn, next_tile = self.advance(p_turn, p_tile, mine, step)
                p_turn, p_tile = self.only(live, next_turn, p_turn), self.only(live, next_tile, p_tile)
                position = self.only(live, position + 1, position)
            self.reduce(acc, kept, base + parity * layout.partial, out, m, n, tile, thread, warp, lane)
            parity = parity ^ 1

    # Weights into shared memory.

    def start_barriers(self, barriers, lane):
        """One barrier a slot, each completed by the lane that announces the bytes and by the bytes."""
        if self.p.staging == "bulk":
            for s in range(self.p.stages):
                arch.inline_ptx(
                    "mbarrier.init.shared::cta.b64 [{$r0}], {$r1};",
                    read_only_args=[barriers + s * 8, Int32(1)],
                    predicate=lane == 0,
                )
            arch.inline_ptx("fence.mbarrier_init.release.cluster;")
            arch.sync_warp()

    def stage(self, w, n, tile, tiles, turn, warp, lane, address, bar, policy):
        """Begin to copy this warp's chunk number `turn` of a tile; nothing where `tile` lies beyond the last one."""
        p, layout = self.p, self.shared
        wanted = tile < tiles
        start = w + Int64((turn * p.warps + warp) * (p.chunk * 2))
        if p.staging == "bulk":
            arch.inline_ptx(
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
                read_only_args=[bar, Int32(p.rows * p.chunk * 2)],
                predicate=cutlass.and_(wanted, lane == 0),
            )
            for i in range(-(-p.rows // 32)):
                row = lane + i * 32
                source = start + Int64(cutlass.min(tile * p.rows + row, n - 1)) * (self.k * 2)
                arch.inline_ptx(
                    BULK,
                    read_only_args=[address + row * layout.pitch, source, Int32(p.chunk * 2), bar, policy],
                    predicate=cutlass.and_(wanted, row < p.rows),
                )
            return
        pieces = p.chunk // 8
        for i in range(p.rows * pieces // 32):
            row, piece = (lane + i * 32) // pieces, (lane + i * 32) % pieces
            source = start + Int64(cutlass.min(tile * p.rows + row, n - 1)) * (self.k * 2) + Int64(piece * 16)
            arch.inline_ptx(
                CP_ASYNC,
                read_only_args=[address + row * layout.pitch + piece * 16, source, policy],
                predicate=wanted,
            )
        arch.cp_async_commit_group()

    def advance(self, turn, tile, mine, step):
        """The chunk after this one: the next turn of the tile, or the first of the CTA's next tile."""
        over = turn + 1 == mine
        return choose(over, Int32(0), turn + 1), choose(over, tile + step, tile)

    def wait(self, bar, parity, live):
        """Wait until this turn's weights are in shared memory, for every lane to read."""
        if self.p.staging == "bulk":
            arch.inline_ptx(WAIT, read_only_args=[bar, parity, self.only(live, Int32(1), Int32(0))])
        else:
            arch.cp_async_wait_group(self.p.stages - 1)
            arch.sync_warp()

    def live(self, j, warp):
        """Does this warp have a chunk in turn j? None where all have."""
        return None if (j + 1) * self.p.warps <= self.chunks else j * self.p.warps + warp < self.chunks

    @staticmethod
    def only(live, yes, no):
        """`yes` for a live turn, else `no`."""
        return yes if live is None else choose(live, yes, no)

    # Products.

    def rows_of_x(self, x, m, lane):
        """Where this lane's pieces of x begin; rows beyond M repeat the last one, their products are dropped."""
        offset = Int64((lane % 4) * 16)
        return [
            x + Int64(cutlass.min(lane // 4 + i * 8, m - 1)) * (self.k * 2) + offset for i in range(self.token_tiles)
        ]

    def load_x(self, rows_of_x, j, warp):
        """This lane's words of x for turn j: [step of 32][token tile][4]."""
        chunk = cutlass.min(j * self.p.warps + warp, self.chunks - 1)
        start = Int64(chunk * (self.p.chunk * 2))
        return [[load16(LOAD_X, row + start + s * 64) for row in rows_of_x] for s in range(self.p.chunk // 32)]

    def zeros(self):
        """Accumulators: [row tile · token tile][half of a k step][4]."""
        return [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(self.p.row_tiles * self.token_tiles)]

    def multiply(self, acc, address, x, live):
        """Add the products of one chunk."""
        p, layout = self.p, self.shared
        result = [[list(half) for half in tile] for tile in acc]
        for s in range(p.chunk // 32):
            for i in range(p.row_tiles):
                low = load16(LOAD_SHARED, address + (i * 16 * layout.pitch + s * 64))
                high = [Uint32(0)] * 4
                if p.rows > 8:
                    high = load16(LOAD_SHARED, address + ((i * 16 + 8) * layout.pitch + s * 64))
                for t in range(self.token_tiles):
                    tile = result[i * self.token_tiles + t]
                    for half in range(2):
                        a, b = 2 * half, 2 * half + 1
                        operands = [low[a], high[a], low[b], high[b], x[s][t][a], x[s][t][b], *tile[half]]
                        tile[half] = list(arch.inline_ptx(MMA, write_only_types=[Float32] * 4, read_only_args=operands))
        if live is None:
            return result
        return [
            [[choose(live, new[c], old[c]) for c in range(4)] for new, old in zip(*tiles, strict=True)]
            for tiles in zip(result, acc, strict=True)
        ]

    # Sums.

    def output(self, m, n, tile, thread, q):
        """Row and token of this thread's output number q within the tile, its offset in y, and whether it exists."""
        index = thread + q * self.p.threads
        token, row = index // self.p.rows, index % self.p.rows
        column = tile * self.p.rows + row
        exists = cutlass.and_(token < m, column < n)
        return token, row, Int64(token) * Int64(n) * 2 + Int64(column) * 2, exists

    def load_residual(self, r, m, n, tile, thread):
        """This thread's residual values as float32, loaded before the products."""
        kept = []
        for q in range(self.sums if self.residual else 0):
            _, _, offset, exists = self.output(m, n, tile, thread, q)
            bits = arch.inline_ptx(
                "ld.global.cg.u16 {$w0}, [{$r0}];",
                write_only_types=[Uint16],
                read_only_args=[choose(exists, r + offset, r)],
            )
            word = Uint32(bits) << 16
            kept.append(arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word]))
        return kept

    def reduce(self, acc, kept, partial, out, m, n, tile, thread, warp, lane):
        """Add the warps' partial sums in ascending order, then the residual; round once and store."""
        p, pitch = self.p, self.shared.token_pitch
        mine = partial + warp * (self.tokens * pitch * 4)
        g, t = lane // 4, lane % 4
        for i in range(p.row_tiles):
            for j in range(self.token_tiles):
                low, high = acc[i * self.token_tiles + j]
                for c in range(4 if p.rows > 8 else 2):
                    row, token = g + (i * 16 + (c // 2) * 8), t * 2 + (c % 2 + j * 8)
                    arch.inline_ptx(
                        "st.shared.f32 [{$r0}], {$r1};",
                        read_only_args=[mine + (token * pitch + row) * 4, low[c] + high[c]],
                    )
        arch.sync_threads()
        for q in range(self.sums):
            token, row, offset, exists = self.output(m, n, tile, thread, q)
            if (q + 1) * p.threads > self.tokens * p.rows:
                token = cutlass.min(token, self.tokens - 1)
            source = partial + (token * pitch + row) * 4
            total = Float32(0.0)
            for v in range(p.warps):
                total = total + arch.inline_ptx(
                    "ld.shared.f32 {$w0}, [{$r0}];",
                    write_only_types=[Float32],
                    read_only_args=[source + v * (self.tokens * pitch * 4)],
                )
            if self.residual:
                total = total + kept[q]
            rounded = arch.inline_ptx(
                "cvt.rn.bf16.f32 {$w0}, {$r0};", write_only_types=[Uint16], read_only_args=[total]
            )
            arch.inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[out + offset, rounded], predicate=exists)
