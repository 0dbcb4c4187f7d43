"""Installed distributions by reading the folders on sys.path, without importlib.metadata.

Importing importlib.metadata costs 40 ms (it brings the email package), a quarter of what `import portamoe` may take;
a version and an entry point are each one line of a file in `<name>-<version>.dist-info` (PyPA, "recording installed
projects").
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

_METADATA = {".dist-info": "METADATA", ".egg-info": "PKG-INFO"}


def normalise(name: str) -> str:
    """Return a distribution's name as PyPI compares it: lower case, "-" between the parts (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.lru_cache(maxsize=8)
def _folders(path: tuple[str, ...]) -> Mapping[str, Path]:
    """Return name -> metadata folder; of two that share a name the one earlier on the path counts, as in imports."""
    found: dict[str, Path] = {}
    for place in path:
        try:
            names = sorted(os.listdir(place or "."))  # noqa: PTH208 - only names are needed
        except OSError:
            continue
        for name in names:
            stem, suffix = os.path.splitext(name)  # noqa: PTH122
            if suffix in _METADATA:
                found.setdefault(normalise(stem.partition("-")[0]), Path(place, name))
    return MappingProxyType(found)


def version(name: str) -> str | None:
    """Return the version of an installed distribution, None if there is none of that name."""
    folder = _folders(tuple(sys.path)).get(normalise(name))
    if folder is None:
        return None
    file = folder / _METADATA[folder.suffix] if folder.is_dir() else folder
    match = re.search(r"^Version:[ \t]*(\S+)", _read(file), re.M)
    return match[1] if match else None


def entry_points(group: str) -> tuple[tuple[str, str], ...]:
    """Return (name, "module:attribute") of every entry point of `group`, in the order of sys.path."""
    return _entry_points(tuple(sys.path), group)


@functools.lru_cache(maxsize=8)
def _entry_points(path: tuple[str, ...], group: str) -> tuple[tuple[str, str], ...]:
    return tuple(_read_entry_points(path, group))


def _read_entry_points(path: tuple[str, ...], group: str) -> Iterator[tuple[str, str]]:
    for folder in _folders(path).values():
        text = _read(folder / "entry_points.txt")
        if group not in text:
            continue
        section = None
        for line in (raw.strip() for raw in text.splitlines()):
            if line.startswith("["):
                section = line.strip("[] ")
            elif section == group and "=" in line and not line.startswith(("#", ";")):
                name, _, target = line.partition("=")
                yield name.strip(), target.partition("[")[0].strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
