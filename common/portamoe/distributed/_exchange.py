"""What travels and in which order: pure functions on one rank's tensors.

A token travels as one row of bytes: x, then ids, then (for partial sums) weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Wire:
    """The bytes of a token's row: x (H) of `dtype`, ids (K) int32, weights (K) float32 where the receiver sums."""

    hidden: int
    top_k: int
    dtype: torch.dtype
    weighted: bool

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.hidden * self.dtype.itemsize + 4 * self.top_k * (2 if self.weighted else 1)

    def pack(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return (T, nbytes) uint8."""
        parts = [x, ids.to(torch.int32)]
        if self.weighted:
            parts.append(weights)
        return torch.cat([as_bytes(part) for part in parts], dim=1)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x (T, H), ids (T, K) int32 and weights (T, K) float32, which are empty if they did not travel."""
        first, second = self.hidden * self.dtype.itemsize, self.hidden * self.dtype.itemsize + 4 * self.top_k
        x, ids = _part(packed, 0, first, self.dtype), _part(packed, first, second, torch.int32)
        if not self.weighted:
            return x, ids, torch.empty(len(packed), 0, device=packed.device)
        return x, ids, _part(packed, second, self.nbytes, torch.float32)


def _part(packed: torch.Tensor, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    # A copy of its own, also of a single row: a slice of rows is neither contiguous nor aligned for a kernel.
    return packed[:, first:end].clone(memory_format=torch.contiguous_format).view(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of contiguous rows: (n, columns·itemsize) uint8."""
    return x.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Outgoing:
    """Where one rank's tokens go.

    tokens:      (n,) int64 — token of each row sent, by destination, ascending within one; a token goes once to a rank
    token_count: (ranks,) int64 — rows for each rank
    pairs:       (T·K,) int64 — flat (token, slot) pairs by destination, ascending; those without one come last
    pair_count:  (ranks,) int64 — rows that come back from each rank
    """

    tokens: torch.Tensor
    token_count: torch.Tensor
    pairs: torch.Tensor
    pair_count: torch.Tensor


def outgoing(ids: torch.Tensor, owner: torch.Tensor, ranks: int) -> Outgoing:
    """Sort tokens and pairs by the rank that holds the expert.

    ids:    (T, K), negative: none
    owner:  (E,) int64, rank of each expert
    """
    rank = torch.where(ids < 0, ranks, owner[ids.clamp(min=0).to(torch.int64)])
    targets = torch.arange(ranks, device=ids.device)
    goes = (rank[:, :, None] == targets).any(dim=1)  # (T, ranks)
    flat = rank.flatten()
    return Outgoing(
        tokens=goes.t().nonzero()[:, 1],
        token_count=goes.sum(0),
        pairs=flat.argsort(stable=True),
        pair_count=(flat[:, None] == targets).sum(0),
    )


def local_pairs(ids: torch.Tensor, local: range) -> torch.Tensor:
    """Return the flat pairs whose expert is in `local`, ascending; the host waits for their number."""
    return ((ids >= local.start) & (ids < local.stop)).flatten().nonzero()[:, 0]


def add_in_order(partial: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
    """Write to out[t] the float32 sum of the rows of `partial` that belong to t, in ascending rank, rounded once.

    partial:  (n, H), by rank; counts: rows of each rank; tokens: (n,) token of each row
    """
    total = torch.zeros(out.shape, device=out.device)
    for rows, where in zip(partial.split(list(counts)), tokens.split(list(counts)), strict=True):
        # A rank has a token at most once, so there is nothing to add up within a step.
        total.index_copy_(0, where, total.index_select(0, where) + rows.float())
    out.copy_(total)
