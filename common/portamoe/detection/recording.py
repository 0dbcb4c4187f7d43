"""Recording the facts of a host to a folder, and reading them back.

A recording holds sys/ and proc/ (the files that were read) and host.json, schema 1: machine, python, env, rocm, nvml,
torch, distributions, ptxas, vendor, caches, problems, unreadable (paths that answered EPERM).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from portamoe.detection.files import Files
from portamoe.detection.schema import fault

SCHEMA = 1
HOST_FILE = "host.json"


class DetectionError(RuntimeError):
    """What is there could not be found out; says what was read and what is wrong with it."""


def load(root: Path) -> dict[str, Any]:
    """Return the host.json of a recording, {} when the folder holds only sys/ or proc/.

    Raises DetectionError when `root` is no recording or host.json is not of schema 1.
    """
    path = root / HOST_FILE
    if not path.is_file():
        if (root / "sys").is_dir() or (root / "proc").is_dir():
            return {}
        raise DetectionError(f"{root} is no recording: it holds neither {HOST_FILE} nor sys/ nor proc/")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DetectionError(f"{path} cannot be read: {error}") from error
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        found = facts.get("schema") if isinstance(facts, dict) else type(facts).__name__
        raise DetectionError(f"{path} has schema {found!r}, this version reads {SCHEMA}")
    if wrong := fault(facts):
        raise DetectionError(f"{path}: {wrong}")
    return facts


def save(folder: Path, facts: Mapping[str, Any], files: Files) -> None:
    """Write a recording to `folder`, which must not exist or be empty: beside it first, then renamed.

    Raises FileExistsError or OSError; nothing is left behind then.
    """
    import shutil
    import tempfile

    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is already there; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name in ("sys", "proc"):
            (beside / name).mkdir()
        unreadable = sorted(path for path, text in files.seen.items() if text is None)
        _write(beside / HOST_FILE, json.dumps({**facts, "unreadable": unreadable}, indent=1) + "\n")
        for name, text in files.seen.items():
            target = beside / name.lstrip("/")
            if text is None:
                target.parent.mkdir(parents=True, exist_ok=True)
            else:
                _write(target, text)
        for path in (beside, *beside.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.replace(beside, folder)  # noqa: PTH105 - replaces an empty folder
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
