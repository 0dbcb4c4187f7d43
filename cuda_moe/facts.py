"""Static facts of FlashInfer: found without importing it (its import takes seconds and may touch the device)."""

from __future__ import annotations

import importlib.util
from typing import Any

from portamoe.detection.distributions import version


def vendor_facts() -> dict[str, Any]:
    """Return {"flashinfer": facts or None} for the host's report."""
    return {"flashinfer": flashinfer_facts()}


def flashinfer_facts() -> dict[str, Any] | None:
    """Return the version of the module `flashinfer`, None where it cannot be imported."""
    try:
        if importlib.util.find_spec("flashinfer") is None:
            return None
    except (ImportError, ValueError, AttributeError):  # a stub in sys.modules
        return None
    return {"version": version("flashinfer-python")}
