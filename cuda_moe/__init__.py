"""Backends for NVIDIA devices: fused Triton kernels from SM80 on, and FlashInfer where that supports the device.

Imports portamoe only; FlashInfer, CuteDSL and Triton are imported inside the functions that launch.
"""

from __future__ import annotations

#: "module:attribute" of each backend; the modules import nothing heavy at top level.
BACKENDS: tuple[str, ...] = (
    "cuda_moe.flashinfer_cutedsl:BACKEND",
    "cuda_moe.flashinfer_cutedsl:ATOMIC",
    "cuda_moe.flashinfer_trtllm:BACKEND",
    "cuda_moe.flashinfer_cutlass:BACKEND",
)
