"""Parameters of the two CuteDSL kernels: what may be chosen, what a shape demands, and the memory it takes.

Imports neither torch nor CuteDSL: plans are validated with this on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: Tokens that one launch takes; x has at most this many rows.
MOST_ROWS = 16
#: Shared memory that one CTA may ask for (CUDA C++ Programming Guide, compute capability 9.0 and 10.x).
SHARED_BYTES = 227 * 1024
THREADS_IN_WARP = 32


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets into the shared memory of `cute_mma`: two buffers of partial sums, barriers, then the slots.

    token_pitch:  floats from one token's partial sums to the next; rows + 4 keeps the stores apart in the 32 banks
    pitch:        bytes from one weight row of a slot to the next; ≡ 64 (mod 128), so that 16-byte loads of two
                  neighbouring rows do not meet in a bank
    """

    token_pitch: int
    partial: int
    barriers: int
    slots: int
    pitch: int
    slot: int
    total: int


@dataclass(frozen=True)
class MmaParameters:
    """Parameters of `cute_mma`.

    rows:     weight rows of a CTA's tile: 8, or a multiple of 16
    warps:    warps of a CTA, among which K is split
    chunk:    elements of K in one slot; K must be a multiple
    stages:   slots of each warp
    per_sm:   CTAs of the grid for each multiprocessor; each walks over its tiles
    staging:  how weights reach shared memory: "bulk" (the copy engine, one copy a row) or "cp_async" (16 bytes a lane)
    x_ahead:  chunks of x that are loaded before they are needed
    """

    rows: int = 16
    warps: int = 8
    chunk: int = 128
    stages: int = 2
    per_sm: int = 1
    staging: Literal["bulk", "cp_async"] = "bulk"
    x_ahead: int = 2

    def __post_init__(self) -> None:
        if self.rows != 8 and (self.rows <= 0 or self.rows % 16 or self.rows > 64):
            raise ValueError(f"cute_mma: rows={self.rows}; 8, 16, 32, 48 or 64 weight rows make a tile")
        if not 1 <= self.warps <= 16:
            raise ValueError(f"cute_mma: warps={self.warps}; a CTA has 1 to 16")
        if self.chunk not in {64, 128, 256, 512}:
            raise ValueError(f"cute_mma: chunk={self.chunk}; a slot holds 64, 128, 256 or 512 elements of K")
        if not 1 <= self.stages <= 16 or not 1 <= self.x_ahead <= 8 or not 1 <= self.per_sm <= 8:
            raise ValueError(f"cute_mma: stages 1..16, x_ahead 1..8, per_sm 1..8; got {self}")
        if self.staging not in {"bulk", "cp_async"}:
            raise ValueError(f"cute_mma: staging={self.staging!r}; 'bulk' or 'cp_async'")

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * THREADS_IN_WARP

    @property
    def row_tiles(self) -> int:
        """Products of 16 weight rows that make a tile."""
        return max(1, self.rows // 16)

    def shared(self, token_tiles: int) -> SharedLayout:
        """Lay out the shared memory for 8·`token_tiles` tokens."""
        token_pitch = self.rows + 4
        partial = self.warps * token_tiles * 8 * token_pitch * 4
        barriers = 2 * partial
        slots = -(-(barriers + self.warps * self.stages * 8) // 128) * 128
        pitch = self.chunk * 2 + 64
        slot = self.rows * pitch
        return SharedLayout(token_pitch, partial, barriers, slots, pitch, slot, slots + self.warps * self.stages * slot)

    def check(self, n: int, k: int, m: int) -> None:
        """Raise ValueError where the kernel cannot compute (M, N, K) with these parameters."""
        _check_shape("cute_mma", n, k, m)
        if k % self.chunk:
            raise ValueError(f"cute_mma: K={k} is no multiple of chunk={self.chunk}; choose a smaller chunk")
        if k // self.chunk < self.warps:
            raise ValueError(
                f"cute_mma: K={k} is {k // self.chunk} chunks of {self.chunk} for {self.warps} warps; fewer warps"
            )
        needed = self.shared(token_tiles(m)).total
        if needed > SHARED_BYTES:
            raise ValueError(
                f"cute_mma: {needed} bytes of shared memory (needs <= {SHARED_BYTES}); fewer stages, warps or rows"
            )

    def grid(self, n: int, multiprocessors: int) -> int:
        """CTAs of a launch."""
        return min(-(-n // self.rows), self.per_sm * multiprocessors)


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


def _check_shape(variant: str, n: int, k: int, m: int) -> None:
    if not 1 <= m <= MOST_ROWS:
        raise ValueError(f"{variant}: M={m} (needs 1..{MOST_ROWS}); use torch.nn.functional.linear for more rows")
    if n < 1 or k < 1:
        raise ValueError(f"{variant}: N={n}, K={k}; both must be positive")
