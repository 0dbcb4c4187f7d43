"""Static facts of AMD's AITER for the host's report; nothing of it is imported."""

from __future__ import annotations

import importlib.util
from typing import Any


def vendor_facts() -> dict[str, Any]:
    """Return {"aiter": facts or None}; `rocm_moe.aiter_detect` says which."""
    try:
        if importlib.util.find_spec("aiter") is None:
            return {"aiter": None}
    except (ImportError, ValueError, AttributeError):  # a stub in sys.modules
        return {"aiter": None}
    from rocm_moe.aiter_detect import detect_aiter

    return {"aiter": detect_aiter()}
