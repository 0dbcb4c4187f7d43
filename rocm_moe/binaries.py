"""The loaded kernels of one device and spec, compiled once a node however many ranks start together."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import time
from typing import TYPE_CHECKING, TextIO

from rocm_moe.triton_compat import Binary, cache_folder
from rocm_moe.variants import kernel_variants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from portamoe.spec import MoESpec
    from rocm_moe.tiles import TileTable
    from rocm_moe.variants import Variant

#: Seconds that a rank waits for others before it compiles a kernel itself; one takes a few seconds.
PATIENCE = 120.0
_PAUSE = 0.05


class Binaries:
    """Kernels by name, loaded on the device that is current when they are first asked for."""

    def __init__(self, arch: str, spec: MoESpec, table: TileTable) -> None:
        self._arch = arch
        self._variants = {variant.name: variant for variant in kernel_variants(arch, spec, table)}
        self._loaded: dict[str, Binary] = {}

    def __len__(self) -> int:
        return len(self._variants)

    def variant(self, name: str) -> Variant:
        """Return the variant of that name."""
        return self._variants[name]

    def get(self, name: str) -> Binary:
        """Return a kernel, compiled and loaded now if it was not before.

        Raises RuntimeError inside a graph capture, where nothing can be loaded.
        """
        loaded = self._loaded.get(name)
        if loaded is None:
            import torch

            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the kernel {name} is not loaded yet, and a graph is being captured; "
                    "call warm_up(max_tokens) before the capture"
                )
            loaded = self._loaded[name] = Binary(self._variants[name], self._arch)
        return loaded

    def load_all(self) -> None:
        """Compile and load every kernel, sharing the work with other processes that use the same cache."""
        missing = [name for name in self._variants if name not in self._loaded]
        folder = cache_folder()
        for name in share_work(missing, lambda name: self._lock_file(folder, name)):
            self.get(name)

    def _lock_file(self, folder: Path, name: str) -> Path:
        variant = self._variants[name]
        key = repr((self._arch, name, variant.signature, sorted(variant.constexprs.items())))
        return folder / f"portamoe-{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock"


def share_work(names: Iterable[str], lock_file: Callable[[str], Path], patience: float = PATIENCE) -> Iterator[str]:
    """Yield every name, each under a lock of its own; names that another process works on come later.

    So eight ranks compile different kernels and find the others' in the cache. A lock that stays taken for `patience`
    seconds, or a file system without locks, delays nobody further: the name comes without it.
    """
    waiting = list(names)
    deadline = time.monotonic() + patience
    while waiting:
        left = []
        for name in waiting:
            with _try_lock(lock_file(name)) as free:
                if free or time.monotonic() > deadline:
                    yield name
                else:
                    left.append(name)
        if len(left) == len(waiting):
            time.sleep(_PAUSE)
        elif left:
            deadline = time.monotonic() + patience
        waiting = left


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on `path` if it is free; True also where files cannot be locked at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: TextIO = path.open("a", encoding="ascii")
    except OSError:  # a read-only cache: Triton itself will say so when it compiles
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        except OSError:  # no locks on this file system
            yield True
        else:
            yield True  # closing the file gives the lock back
