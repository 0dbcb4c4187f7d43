"""Which rank holds which expert."""

from __future__ import annotations

from collections.abc import Sequence


def split_experts(num_experts: int, rank: int, size: int) -> range:
    """Return rank's contiguous share of the experts; shares differ by one at most, the first are the larger ones.

    Raises ValueError where a rank would be left without an expert or `rank` is out of range.
    """
    if not 1 <= size <= num_experts:
        raise ValueError(f"{num_experts} experts over {size} ranks: every rank needs at least one; use fewer ranks")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be within 0 … {size - 1}, got {rank}")
    share, larger = divmod(num_experts, size)
    first = rank * share + min(rank, larger)
    return range(first, first + share + (rank < larger))


def owners(ranges: Sequence[tuple[int, int]], num_experts: int) -> list[int]:
    """Return the rank of every expert, given each rank's [first, end).

    Raises ValueError that names the expert which no rank, or more than one, holds.
    """
    out = [-1] * num_experts
    for rank, (first, end) in enumerate(ranges):
        for expert in range(first, end):
            if out[expert] >= 0:
                raise ValueError(
                    f"expert {expert} is on ranks {out[expert]} and {rank}; local_experts of the ranks must not "
                    "overlap, see split_experts"
                )
            out[expert] = rank
    if -1 in out:
        raise ValueError(f"expert {out.index(-1)} of {num_experts} is on no rank; see split_experts")
    return out
