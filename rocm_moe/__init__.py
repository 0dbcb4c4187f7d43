"""Backends for AMD devices: MXFP4 experts through Triton, and through AMD's AITER where that supports the device.

Imports portamoe only; AITER and Triton are imported inside the functions that launch.
"""

from __future__ import annotations

from portamoe.backend import Announcement

#: "module:attribute" of each backend, or an announcement; the modules import nothing heavy at top level.
BACKENDS: tuple[str | Announcement, ...] = (
    Announcement("rocm_moe.aiter.backend:BACKEND", "aiter", 100, ("amd",)),
    "rocm_moe.triton_unfused:BACKEND",
)

#: Who has kernels for `portamoe.linear`.
LINEAR_PROVIDERS: tuple[Announcement, ...] = (
    Announcement("rocm_moe.skinny_gemv:PROVIDER", "skinny_gemv", 10, ("amd",)),
)
