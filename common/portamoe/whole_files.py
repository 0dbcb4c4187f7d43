"""Files that are there as a whole or not at all: written beside their place, then moved into it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`; what is there replaces `path` when the block ends, and is removed when it raises."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
