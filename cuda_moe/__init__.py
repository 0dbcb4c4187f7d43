"""Backends for NVIDIA devices: fused Triton kernels from SM80 on, and FlashInfer where that supports the device.

Imports portamoe only; FlashInfer, CuteDSL and Triton are imported inside the functions that launch.
"""

from __future__ import annotations

from portamoe.backend import Announcement

#: Name and priority are those of the backend itself; the modules import nothing heavy at top level.
BACKENDS: tuple[str | Announcement, ...] = (
    Announcement("cuda_moe.flashinfer.cutedsl:BACKEND", "flashinfer_cutedsl", 95, ("nvidia",)),
    Announcement("cuda_moe.flashinfer.cutedsl:ATOMIC", "flashinfer_cutedsl_atomic", 94, ("nvidia",)),
    Announcement("cuda_moe.flashinfer.trtllm:BACKEND", "flashinfer_trtllm", 90, ("nvidia",)),
    Announcement("cuda_moe.triton_fused:BACKEND", "triton_fused", 80, ("nvidia",)),
    Announcement("cuda_moe.triton_fused:BATCH_INVARIANT", "triton_fused_invariant", 65, ("nvidia",)),
    Announcement("cuda_moe.flashinfer.cutlass:BACKEND", "flashinfer_cutlass", 70, ("nvidia",)),
)

#: Who has kernels for `portamoe.linear`.
LINEAR_PROVIDERS: tuple[Announcement, ...] = (
    Announcement("cuda_moe.skinny.provider:PROVIDER", "skinny", 10, ("nvidia",)),
)
