"""Static facts of AMD's AITER: found in its files, nothing of it is imported.

Importing AITER runs rocminfo, may compile C++ and raises RuntimeError or KeyError without a supported GPU, and the PyPI
name `aiter` belongs to somebody else's package whose version number is the higher one. So the files decide.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from portamoe.detection.distributions import version

#: AMD's tree has both; the async-iterator package of the same name has neither.
AMD_FILES = ("jit/core.py", "fused_moe.py")
#: Where the enum of activations lies: in a wheel, and in a source tree.
ENUM_FILES = ("../aiter_meta/csrc/include/aiter_enum.h", "../csrc/include/aiter_enum.h")


def vendor_facts() -> dict[str, Any]:
    """Return {"aiter": facts or None} for the host's report."""
    return {"aiter": aiter_facts()}


def aiter_facts() -> dict[str, Any] | None:
    """Return version, is_amd, has_situv2 of the module `aiter`, None where it cannot be imported."""
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError, AttributeError):  # a stub in sys.modules
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    root = Path(places[0]) if places else Path(spec.origin or "")
    is_amd = all((root / name).is_file() for name in AMD_FILES)
    return {
        "version": _version(root, is_amd),
        "is_amd": is_amd,
        "has_situv2": is_amd and any("Situv2" in _read(root / name) for name in ENUM_FILES),
    }


def _version(root: Path, is_amd: bool) -> str | None:
    for name in ("amd-aiter", "aiter") if is_amd else ("aiter",):
        if found := version(name):
            return found
    match = re.search(r"^(?:__version__|version)\b[^'\"\n]*['\"]([^'\"]+)", _read(root / "_version.py"), re.M)
    return match[1] if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
