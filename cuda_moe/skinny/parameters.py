"""Parameters of the Triton kernels: what may be chosen, and what a shape demands.

Imports neither torch nor Triton: plans are validated with this on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Rows of x up to which these kernels are made; more go to torch.
MOST_ROWS = 16
#: Shared memory that one CTA may ask for (CUDA C++ Programming Guide, compute capability 9.0 and 10.x).
SHARED_BYTES = 227 * 1024
#: bf16 values of one 16-byte load.
VECTOR = 8
THREADS_IN_WARP = 32
#: float32 sums a thread of the CUDA-core kernel may hold without spilling beside its loads.
MOST_SUMS = 32
#: 16-byte loads a lane may have in flight: four registers each, of 255.
MOST_VECTORS = 36


def padded(m: int) -> int:
    """Return M rounded up to a power of two, as Triton's shapes demand."""
    return 1 << (m - 1).bit_length()


@dataclass(frozen=True)
class TritonGemv:
    """Parameters of `triton_gemv`, on the CUDA cores.

    rows:    weight rows of a program
    warps:   warps of a program, all on the same rows
    unroll:  16-byte vectors of each row that a thread loads in one step
    """

    rows: int = 2
    warps: int = 4
    unroll: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("rows", (1, 2, 4, 8)), ("warps", (1, 2, 4, 8, 16)), ("unroll", (1, 2, 4, 8))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"triton_gemv: {name}={getattr(self, name)}; one of {allowed}")

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return self.warps * THREADS_IN_WARP

    @property
    def step(self) -> int:
        """Values of K that a program takes at a time."""
        return self.threads * self.unroll * VECTOR

    def check(self, n: int, k: int, m: int) -> None:
        """Raise ValueError where the kernel cannot compute (M, N, K) with these parameters."""
        _check_shape("triton_gemv", n, k, m)
        if padded(m) * self.rows * self.unroll > MOST_SUMS:
            raise ValueError(
                f"triton_gemv: M={m} padded to {padded(m)}, rows={self.rows}, unroll={self.unroll} are more than "
                f"{MOST_SUMS} values in flight a thread; fewer rows"
            )

    def grid(self, n: int) -> tuple[int, int]:
        """Programs of a launch."""
        return math.ceil(n / self.rows), 1

    def even(self, n: int, k: int) -> bool:
        """Return whether no load needs a mask."""
        return k % self.step == 0 and n % self.rows == 0


@dataclass(frozen=True)
class TritonMma:
    """Parameters of `triton_mma`, on the tensor cores.

    rows:    weight rows of a program
    groups:  warps of a program, each with its own part of every step of K
    depth:   values of K of one group in one step
    stages:  Triton's num_stages: steps in shared memory and on the way, plus the one being computed
    split:   programs among which K of one tile is split; the last to arrive adds their sums in a fixed order
    """

    rows: int = 16
    groups: int = 4
    depth: int = 64
    stages: int = 4
    split: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (
            ("rows", (16, 32, 64)),
            ("groups", (1, 2, 4, 8)),
            ("depth", (16, 32, 64, 128)),
            ("split", (1, 2, 4, 8)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"triton_mma: {name}={getattr(self, name)}; one of {allowed}")
        if not 1 <= self.stages <= 12:
            raise ValueError(f"triton_mma: stages={self.stages}; 1 to 12")

    @property
    def step(self) -> int:
        """Values of K that a program takes at a time."""
        return self.groups * self.depth

    def check(self, n: int, k: int, m: int) -> None:
        """Raise ValueError where the kernel cannot compute (M, N, K) with these parameters."""
        _check_shape("triton_mma", n, k, m)
        needed = 2 * max(1, self.stages - 1) * self.step * (self.rows + token_columns(m))
        if needed > SHARED_BYTES:
            raise ValueError(f"triton_mma: {needed} bytes of shared memory (needs <= {SHARED_BYTES}); fewer stages")
        if self.split > math.ceil(k / self.step):
            raise ValueError(f"triton_mma: split={self.split} of {math.ceil(k / self.step)} steps of K; split less")

    def tiles(self, n: int) -> int:
        """Tiles of weight rows."""
        return math.ceil(n / self.rows)

    def grid(self, n: int) -> tuple[int, int]:
        """Programs of a launch."""
        return self.tiles(n), self.split

    def even(self, n: int, k: int) -> bool:
        """Return whether no load of weights needs a mask."""
        return k % self.step == 0 and n % self.rows == 0


@dataclass(frozen=True)
class TritonFragments:
    """Parameters of `triton_fragments`, on the tensor cores without shared memory in between.

    rows:    weight rows of a program
    warps:   warps of a program, each with its own part of every step of K
    chunks:  pieces of 32 values of K that a warp takes in one step
    ahead:   whether the loads of the next step are sent before this one is computed
    """

    rows: int = 16
    warps: int = 4
    chunks: int = 4
    ahead: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("rows", (8, 16, 32)), ("warps", (1, 2, 4, 8, 16)), ("chunks", (1, 2, 4, 8))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"triton_fragments: {name}={getattr(self, name)}; one of {allowed}")
        if not isinstance(self.ahead, bool):
            raise ValueError(f"triton_fragments: ahead={self.ahead!r}; true or false")

    def tokens(self, m: int) -> int:
        """Return the rows of x that the product has room for: 8 rows of w need the operand with 16 for x."""
        return 16 if self.rows == 8 else token_columns(m)

    @property
    def step(self) -> int:
        """Values of K that a program takes at a time."""
        return 32 * self.chunks * self.warps

    def check(self, n: int, k: int, m: int) -> None:
        """Raise ValueError where the kernel cannot compute (M, N, K) with these parameters."""
        _check_shape("triton_fragments", n, k, m)
        if k % 32:
            raise ValueError(f"triton_fragments: K={k} is no multiple of 32")
        vectors = self.chunks * (self.rows + self.tokens(m)) // 8 * (2 if self.ahead else 1)
        if vectors > MOST_VECTORS:
            raise ValueError(
                f"triton_fragments: {vectors} vectors in flight a lane (needs <= {MOST_VECTORS}); fewer chunks"
            )

    def grid(self, n: int) -> tuple[int, int]:
        """Programs of a launch."""
        return math.ceil(n / self.rows), 1

    def even(self, n: int, k: int) -> bool:
        """Return whether no load of weights needs a mask."""
        return k % self.step == 0 and n % self.rows == 0


TritonTile = TritonGemv | TritonMma | TritonFragments


def token_columns(m: int) -> int:
    """Columns of the product that M rows of x take: 8 or 16, so a plan's kernel is compiled twice at most."""
    return 8 if m <= 8 else 16


def _check_shape(kernel: str, n: int, k: int, m: int) -> None:
    if not 1 <= m <= MOST_ROWS:
        raise ValueError(f"{kernel}: M={m} (needs 1..{MOST_ROWS}); use torch for more rows")
    if n < 1 or k < 64 or k % 16:
        raise ValueError(f"{kernel}: N={n}, K={k} (needs N >= 1 and K a multiple of 16 from 64 on)")
