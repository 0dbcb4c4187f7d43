"""Reading sysfs and procfs, live or below the folder of a recording."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


class Files:
    """Text files of the kernel by absolute path, read below `root`.

    root:        "/" for the live machine, the folder of a recording to replay it
    unreadable:  paths that raise PermissionError whatever the file system says; recordings carry them

    Everything that was read is kept in `seen` (None: PermissionError), which is what a recording has to hold.
    """

    def __init__(self, root: Path = Path("/"), unreadable: Collection[str] = ()) -> None:
        self.root = root
        self.unreadable = frozenset(unreadable)
        self.seen: dict[str, str | None] = {}

    def text(self, path: str, limit: int = -1) -> str | None:
        """Return the file's text or its first `limit` characters, None where there is no such file.

        Raises PermissionError: the kernel answers so for a device that this job may not use.
        """
        if path in self.unreadable:
            self.seen[path] = None
            raise PermissionError(path)
        try:
            with (self.root / path.lstrip("/")).open(encoding="utf-8", errors="replace") as file:
                text = file.read(limit)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except PermissionError:
            self.seen[path] = None
            raise
        self.seen[path] = text
        return text

    def readable_text(self, path: str, limit: int = -1) -> str | None:
        """Return what `text` does, None also where the file may not be read."""
        try:
            return self.text(path, limit)
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, none where there is no such folder."""
        try:
            return [entry.name for entry in (self.root / path.lstrip("/")).iterdir()]
        except OSError:
            return []


def properties(text: str) -> dict[str, int]:
    """Parse the `name value` lines of a KFD properties file; values that are no integers are left out."""
    out: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        try:
            out[name] = int(value)
        except ValueError:
            continue
    return out
