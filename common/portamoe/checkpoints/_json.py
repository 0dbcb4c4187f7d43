"""JSON as checkpoints hold it: one object, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from portamoe.checkpoints.errors import CheckpointError


def parse_object(text: str | bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `text`; `what` names it in errors.

    Raises CheckpointError when it is not JSON, not an object, or holds a key twice (of which most parsers would
    silently keep the last).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            seen: set[str] = set()
            twice = sorted({key for key, _ in pairs if key in seen or seen.add(key)})  # type: ignore[func-returns-value]
            raise CheckpointError(f"{what} holds {', '.join(map(repr, twice))} more than once")
        return out

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{what} holds a JSON {type(data).__name__}, expected an object")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`; raises CheckpointError as `parse_object` does, or when unreadable."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_object(text, str(path))
