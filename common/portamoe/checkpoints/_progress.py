"""A progress bar for the experts that a layer is loading."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from portamoe.checks import weight_bytes

if TYPE_CHECKING:
    from portamoe.spec import MoESpec

#: Seconds before a bar appears: what is loaded faster needs none.
_DELAY = 1.0


@contextmanager
def loading_bar(spec: MoESpec, what: str = "experts") -> Iterator[Callable[[int, int], None]]:
    """Show a bar of bytes and rate on stderr while the experts of `spec` are loaded; yields the `progress` to pass on.

    with loading_bar(spec, "layer 7") as progress:
        experts = RoutedExperts(spec, source, max_tokens=8192, progress=progress)
    """
    from tqdm import tqdm

    total = weight_bytes(spec)
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=_DELAY, leave=False, file=sys.stderr) as bar:

        def progress(done: int, experts: int) -> None:
            bar.update(total * done // experts - bar.n)

        yield progress
