"""Backends for AMD devices: MXFP4 experts through Triton, and through AMD's AITER where that supports the device.

Imports portamoe only; AITER and Triton are imported inside the functions that launch.
"""

from __future__ import annotations

#: "module:attribute" of each backend; the modules import nothing heavy at top level.
BACKENDS: tuple[str, ...] = (
    "rocm_moe.aiter_backend:BACKEND",
    "rocm_moe.triton_unfused:BACKEND",
)
