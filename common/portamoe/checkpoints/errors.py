"""The error that a checkpoint raises when it cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHOWN = 8


class CheckpointError(ValueError):
    """A checkpoint, its config or one of its files is not what it says it is, or is of a kind that is not read.

    missing:  every expected tensor name that is not there (the message shows the first few)
    surplus:  every tensor name that should not be there
    """

    def __init__(self, message: str, *, missing: Sequence[str] = (), surplus: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.surplus = tuple(surplus)


def shorten(items: Iterable[object]) -> str:
    """Return the items with commas between them, all after the first few as a count."""
    names = [str(item) for item in items]
    text = ", ".join(names[:_SHOWN])
    return text + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
