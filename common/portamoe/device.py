"""What is there: devices and the host around them, as plain facts.

The facts are gathered by `portamoe.detection`; this file holds their types and the predicates on them. The vendor is
part of every comparison: ROCm's capability (9, 0) is gfx90a, CUDA's is Hopper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from portamoe.decision import Reason

Vendor = Literal["amd", "nvidia", "cpu"]

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Host:
    """Facts of the machine and the software on it, live or replayed from a recording.

    machine, python:  "x86_64", "3.12"
    system:           kernel and distribution, None where a recording does not say
    env:              the environment variables that matter here
    rocm:             {"version": "6.4.4", "kfd": "openable" | "permission denied" | "absent", "driver": ...} or None
    nvml:             {"driver": ..., "cuda": ...} or None
    torch:            {"version": ..., "hip": ..., "cuda": ...} or None, read without importing torch
    distributions:    name -> version as importlib.metadata sees them
    ptxas:            {"version": ..., "targets": ["sm_90a", ...]} or None
    vendor:           static facts of aiter, flashinfer, triton; None where absent
    caches:           variable -> {"path": ..., "writable": bool, "set": bool, "filesystem": ...}
    visibility:       vendor -> {"present": 8, "unreadable": 0, "visible": [0, 1], "because": ...}
    memory_bytes, memory_free_bytes:  of the host's RAM, within the limit of the control group
    problems:         what went wrong or looks odd while detecting, for the report
    recorded:         this was replayed from a folder; `live` names the facts the folder lacked
    """

    machine: str
    python: str
    system: str | None = None
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    rocm: Mapping[str, Any] | None = None
    nvml: Mapping[str, Any] | None = None
    torch: Mapping[str, Any] | None = None
    distributions: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    ptxas: Mapping[str, Any] | None = None
    vendor: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    caches: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _EMPTY)
    visibility: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _EMPTY)
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    problems: tuple[Reason, ...] = ()
    recorded: str | None = None
    live: tuple[str, ...] = ()


@dataclass(frozen=True)
class Device:
    """One device as this process may use it.

    arch:         "gfx90a", "sm_90", "cpu"; "unknown" where the driver does not say
    index:        the ordinal that torch would give it ("cuda:<index>"), after the visibility variables
    memory_bytes, memory_free_bytes:  None where the driver does not say
    found_by:     "kfd", "nvml", "procfs" or "always" (the CPU)
    """

    vendor: Vendor
    arch: str
    index: int
    name: str
    host: Host = field(repr=False, compare=False)
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    uuid: str | None = None
    found_by: str = "always"
    compute_units: int | None = None

    @property
    def torch_name(self) -> str:
        """How torch calls it: "cpu", or "cuda:0" for either GPU vendor."""
        return "cpu" if self.vendor == "cpu" else f"cuda:{self.index}"

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability of an NVIDIA device, (9, 0) for "sm_90"; None for all others."""
        if self.vendor != "nvidia" or not self.arch.startswith("sm_"):
            return None
        digits = self.arch.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])


def gfx_arch(name: str) -> str:
    """Return the plain target of an AMD arch name: "gfx90a" for "gfx90a:sramecc+:xnack-".

    Raises ValueError for anything that is no gfx name.
    """
    arch = name.strip().lower().split(":", 1)[0]
    if not re.fullmatch(r"gfx[0-9a-f]{3,4}|gfx\d+(-\d+)?-generic", arch):
        raise ValueError(f"{name!r} is no AMD target, expected something like 'gfx90a' or 'gfx942:xnack-'")
    return arch


def is_cdna(device: Device) -> bool:
    """MI100, MI200, MI300, MI350: wave64 with matrix cores (MFMA)."""
    return device.vendor == "amd" and device.arch in {"gfx908", "gfx90a", "gfx942", "gfx950"}


def is_rdna(device: Device) -> bool:
    """RDNA3 and RDNA4: wave32 with WMMA."""
    return device.vendor == "amd" and device.arch.startswith(("gfx11", "gfx12")) and device.arch != "gfx1250"


def has_native_fp4(device: Device) -> bool:
    """Matrix instructions that take FP4 operands: gfx950, gfx1250, SM100 and later."""
    if device.vendor == "amd":
        return device.arch in {"gfx950", "gfx1250"}
    capability = device.capability
    return capability is not None and capability >= (10, 0)
