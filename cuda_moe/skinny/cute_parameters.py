"""Parameters of the two CuteDSL kernels: what may be chosen, what a shape demands, and the memory it takes.

Imports neither torch nor CuteDSL: plans are validated with this on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Tokens that one launch takes; x has at most this many rows.
MOST_ROWS = 16
#: Shared memory that one CTA may ask for (CUDA C++ Programming Guide, compute capability 9.0 and 10.x).
SHARED_BYTES = 227 * 1024
#: Shared memory that the system keeps for itself in each CTA.
RESERVED_BYTES = 1024
THREADS_IN_WARP = 32
#: Registers of a thread that `cute_mma` takes for weights and addresses, beside those for x and for sums (read off
#: compiled kernels: with fewer they spill).
OTHER_REGISTERS = 64


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets into the shared memory of `cute_mma`: the warps' sums, two buffers for other CTAs' sums, the slots.

    token_pitch:  floats from one token's partial sums to the next; rows + 4 keeps the stores apart in the 32 banks
    """

    token_pitch: int
    exchange: int
    exchanged: int
    slots: int
    slot: int
    total: int


@dataclass(frozen=True)
class MmaParameters:
    """Parameters of `cute_mma`.

    rows:     weight rows of a tile: 8, or a multiple of 16
    split:    CTAs of a cluster, among which K is split; they exchange their sums through distributed shared memory
    warps:    warps of a CTA, among which its part of K is split
    chunk:    elements of K in one slot; K must be a multiple of split · warps · chunk
    stages:   slots of each warp
    per_sm:   CTAs of the grid for each multiprocessor; each walks over its tiles
    """

    rows: int = 16
    split: int = 1
    warps: int = 8
    chunk: int = 128
    stages: int = 2
    per_sm: int = 1

    def __post_init__(self) -> None:
        if self.rows != 8 and (self.rows <= 0 or self.rows % 16 or self.rows > 128):
            raise ValueError(f"cute_mma: rows={self.rows}; 8 or a multiple of 16 up to 128 weight rows make a tile")
        if self.split not in {1, 2, 4, 8} or self.rows % self.split:
            raise ValueError(f"cute_mma: split={self.split}; 1, 2, 4 or 8, and a divisor of rows={self.rows}")
        if not 1 <= self.warps <= 16:
            raise ValueError(f"cute_mma: warps={self.warps}; a CTA has 1 to 16")
        if self.chunk not in {64, 128, 256, 512}:
            raise ValueError(f"cute_mma: chunk={self.chunk}; a slot holds 64, 128, 256 or 512 elements of K")
        if not 1 <= self.stages <= 16 or not 1 <= self.per_sm <= 8:
            raise ValueError(f"cute_mma: stages 1..16, per_sm 1..8; got {self}")

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * THREADS_IN_WARP

    @property
    def row_tiles(self) -> int:
        """Products of 16 weight rows that make a tile."""
        return max(1, self.rows // 16)

    def turns(self, k: int) -> int:
        """Chunks of one warp in one tile."""
        return k // (self.split * self.warps * self.chunk)

    def shared(self, token_tiles: int) -> SharedLayout:
        """Lay out the shared memory for 8·`token_tiles` tokens."""
        tokens = 8 * token_tiles
        token_pitch = self.rows + 4
        exchange = self.warps * tokens * token_pitch * 4
        exchanged = tokens * self.rows * 4 if self.split > 1 else 0
        slots = -(-(exchange + 2 * exchanged) // 128) * 128
        slot = self.rows * self.chunk * 2
        total = slots + self.warps * self.stages * slot
        return SharedLayout(token_pitch, exchange, exchanged, slots, slot, total)

    def registers(self, k: int, token_tiles: int) -> int:
        """Registers of a thread that x and the sums fill."""
        return (self.turns(k) * self.chunk // 8 + self.row_tiles * 4) * token_tiles

    def resident(self, k: int, token_tiles: int) -> int:
        """CTAs that shall fit on a multiprocessor together; the compiler is given its registers accordingly.

        Two where memory and registers allow: the next launch's CTA then begins to stage beside this one's.
        """
        shared = SHARED_BYTES // (self.shared(token_tiles).total + RESERVED_BYTES)
        needed = self.registers(k, token_tiles) + OTHER_REGISTERS
        return 2 if shared >= 2 and needed <= _registers_a_thread(2 * self.warps) else 1

    def check(self, n: int, k: int, m: int) -> None:
        """Raise ValueError where the kernel cannot compute (M, N, K) with these parameters."""
        _check_shape("cute_mma", n, k, m)
        step = self.split * self.warps * self.chunk
        if k % step:
            raise ValueError(
                f"cute_mma: K={k} is no multiple of split·warps·chunk={step}; choose a divisor of K for each"
            )
        tiles = token_tiles(m)
        needed = self.shared(tiles).total
        if needed > SHARED_BYTES:
            raise ValueError(
                f"cute_mma: {needed} bytes of shared memory (needs <= {SHARED_BYTES}); fewer stages, warps or rows"
            )
        registers, most = self.registers(k, tiles) + OTHER_REGISTERS, _registers_a_thread(self.warps)
        if registers > most:
            raise ValueError(
                f"cute_mma: {registers} registers for x, sums and addresses (needs <= {most}); a larger split, or more "
                "warps, leave less of x to each"
            )

    def grid(self, n: int, multiprocessors: int) -> int:
        """CTAs of a launch."""
        return min(-(-n // self.rows), max(1, self.per_sm * multiprocessors // self.split)) * self.split


@dataclass(frozen=True)
class GemvParameters:
    """Parameters of `cute_gemv`.

    threads:  threads of a CTA; each reads 16 bytes of a row at a time, so K must be a multiple of 8·threads
    outputs:  weight rows of a CTA
    ahead:    steps of weights that are loaded before they are needed, the first ones before the wait of programmatic
              dependent launch
    """

    threads: int = 128
    outputs: int = 2
    ahead: int = 2

    def __post_init__(self) -> None:
        if self.threads % THREADS_IN_WARP or not THREADS_IN_WARP <= self.threads <= 512:
            raise ValueError(f"cute_gemv: threads={self.threads}; a multiple of 32 up to 512")
        if not 1 <= self.outputs <= 8 or not 1 <= self.ahead <= 16:
            raise ValueError(f"cute_gemv: outputs 1..8, ahead 1..16; got {self}")

    def shared_bytes(self, m: int) -> int:
        """Bytes of shared memory: one float32 for each warp, weight row and token."""
        return self.threads // THREADS_IN_WARP * self.outputs * m * 4

    def check(self, n: int, k: int, m: int) -> None:
        """Raise ValueError where the kernel cannot compute (M, N, K) with these parameters."""
        _check_shape("cute_gemv", n, k, m)
        if k % (8 * self.threads):
            raise ValueError(f"cute_gemv: K={k} is no multiple of 8·threads={8 * self.threads}; choose fewer threads")

    def grid(self, n: int, multiprocessors: int) -> int:  # noqa: ARG002 - the same question as MmaParameters.grid
        """CTAs of a launch."""
        return -(-n // self.outputs)


Parameters = MmaParameters | GemvParameters
VARIANTS: dict[str, type[MmaParameters] | type[GemvParameters]] = {
    "cute_mma": MmaParameters,
    "cute_gemv": GemvParameters,
}


def token_tiles(m: int) -> int:
    """Groups of 8 tokens that `cute_mma` computes for M rows: its kernels for M <= 8 and M <= 16 differ."""
    return 1 if m <= 8 else 2


def parse(variant: str, parameters: dict[str, Any]) -> Parameters:
    """Return the parameters of a plan's entry; ValueError for an unknown variant or name."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown CuteDSL variant {variant!r}; {', '.join(VARIANTS)}")
    kind = VARIANTS[variant]
    unknown = set(parameters) - set(kind.__dataclass_fields__)
    if unknown:
        names = ", ".join(kind.__dataclass_fields__)
        raise ValueError(f"{variant}: unknown parameters {', '.join(sorted(unknown))}; it takes {names}")
    return kind(**parameters)


def _registers_a_thread(warps: int) -> int:
    """Registers of each thread when `warps` share a multiprocessor: 16384 for each of its quarters, at most 255."""
    return min(255, 16384 // (-(-warps // 4) * THREADS_IN_WARP) // 8 * 8)


def _check_shape(variant: str, n: int, k: int, m: int) -> None:
    if not 1 <= m <= MOST_ROWS:
        raise ValueError(f"{variant}: M={m} (needs 1..{MOST_ROWS}); use torch.nn.functional.linear for more rows")
    if n < 1 or k < 1:
        raise ValueError(f"{variant}: N={n}, K={k}; both must be positive")
