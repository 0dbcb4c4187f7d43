"""Static facts of FlashInfer for the host's report; nothing of it is imported."""

from __future__ import annotations

from typing import Any


def vendor_facts() -> dict[str, Any]:
    """Return {"flashinfer": facts or None}; `cuda_moe.flashinfer_detect` says which."""
    return {"flashinfer": flashinfer_facts()}


def flashinfer_facts() -> dict[str, Any] | None:
    """Return the facts of the module `flashinfer`, None where it cannot be imported."""
    import importlib.util

    try:
        if importlib.util.find_spec("flashinfer") is None:
            return None
    except (ImportError, ValueError, AttributeError):  # a stub in sys.modules
        return None
    from cuda_moe.flashinfer_detect import detect_flashinfer

    return detect_flashinfer()
