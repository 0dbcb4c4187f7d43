"""Reasons that many backends share: each function returns one, or None where nothing speaks against the backend."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from portamoe.decision import Reason
from portamoe.spec import BLOCK_SIZE

if TYPE_CHECKING:
    from portamoe.device import Device, Host
    from portamoe.spec import MoESpec

#: Where to get a torch that serves the vendor's devices.
TORCH_BUILDS = {
    "amd": ("hip", "a ROCm build", "install torch from the ROCm index, or use a ROCm image"),
    "nvidia": ("cuda", "a CUDA build", "install torch from the index of your CUDA version"),
}


def release(version: str) -> tuple[int, ...]:
    """Return the numbers a version starts with: (2, 9, 0) for "2.9.0a0+git1234", so vendor builds compare."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def at_least(version: str, minimum: str) -> bool:
    """Is `version` at least `minimum`, by release numbers? "3.4" is "3.4.0"."""
    have, want = release(version), release(minimum)
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) >= want + (0,) * (width - len(want))


def vendor_reason(device: Device, *vendors: str) -> Reason | None:
    """The device is of one of `vendors` ("amd", "nvidia", "cpu"); names what keeps a GPU from being seen."""
    if device.vendor in vendors:
        return None
    problem = next((p for p in device.host.problems if p.what in {"/dev/kfd", "AMD GPUs", "NVML"}), None)
    if problem and problem.remedy:
        remedy = f"{problem.what} {problem.value}: {problem.remedy}"
    elif device.vendor == "cpu":
        remedy = "run where such a device is visible, or use torch"
    else:
        remedy = f"use a backend for {device.vendor} devices"
    return Reason(
        "device",
        device.arch if device.vendor == "cpu" else f"{device.vendor} {device.arch}",
        f"vendor {' or '.join(vendors)}",
        remedy,
    )


def arch_reason(device: Device, archs: Collection[str], remedy: str | None = None) -> Reason | None:
    """The device's arch is one of `archs`; the vendor has to be compared first."""
    if device.arch in archs:
        return None
    return Reason("arch", device.arch, ", ".join(sorted(archs)), remedy)


def torch_reason(device: Device, minimum: str | None = None) -> Reason | None:
    """Torch is installed, is built for the device's vendor and is new enough."""
    torch = device.host.torch
    if torch is None:
        return Reason("torch", "not installed", minimum and f">= {minimum}", "pip install torch")
    version = str(torch.get("version"))
    if device.vendor in TORCH_BUILDS:
        key, wanted, remedy = TORCH_BUILDS[device.vendor]
        if not torch.get(key):
            return Reason("torch build", version, wanted, remedy)
    if minimum is not None and not at_least(version, minimum):
        return Reason("torch", version, f">= {minimum}", "use a newer torch")
    return None


def distribution_reason(
    host: Host, names: Sequence[str], minimum: str | None = None, remedy: str | None = None
) -> Reason | None:
    """One of the distributions `names` is installed and new enough."""
    found = next((host.distributions[name] for name in names if name in host.distributions), None)
    limit = f">= {minimum}" if minimum else None
    if found is None:
        return Reason(names[0], "not installed", limit, remedy or f"pip install {names[0]}")
    if minimum is not None and not at_least(found, minimum):
        return Reason(names[0], found, limit, remedy or f"upgrade {names[0]}")
    return None


def triton_reason(host: Host, minimum: str) -> Reason | None:
    """The module `triton` is there, whatever distribution brought it, and new enough."""
    version = host.vendor.get("triton")
    if version is None:
        return Reason("triton", "not installed", f">= {minimum}", "pip install 'portamoe[triton]'")
    if not at_least(version, minimum):
        return Reason("triton", version, f">= {minimum}", "use a newer Triton that fits your torch")
    return None


def cache_reason(host: Host, variable: str) -> Reason | None:
    """The cache folder that `variable` names, or its default, can be written."""
    cache = host.caches.get(variable)
    if cache is None or cache["writable"]:
        return None
    return Reason(variable, f"{cache['path']} cannot be written", "a writable folder", f"set {variable}=/tmp/...")


def memory_reason(needed: int, device: Device, remedy: str | None = None) -> Reason | None:
    """`needed` bytes are free on the device; where the driver does not say what is free, its size counts."""
    free = device.memory_free_bytes if device.memory_free_bytes is not None else device.memory_bytes
    if free is None or needed <= free:
        return None
    return Reason(
        "memory",
        f"{free / 1e9:.1f} GB free on {device.torch_name}",
        f"{needed / 1e9:.1f} GB",
        remedy or "spread the experts over more ranks or free memory",
    )


def multiple_reason(name: str, value: int, multiple: int, remedy: str | None = None) -> Reason | None:
    """`value` is a multiple of `multiple`."""
    return Reason(name, value, f"a multiple of {multiple}", remedy) if value % multiple else None


def weight_bytes(spec: MoESpec) -> int:
    """Return the bytes of this rank's experts in canonical order: packed weights and block scales."""
    values = 3 * spec.hidden_size * spec.intermediate_size
    if spec.weight_format == "bf16":
        return 2 * values * spec.num_local_experts
    return (values // 2 + values // BLOCK_SIZE[spec.weight_format]) * spec.num_local_experts


def present(*reasons: Reason | None) -> list[Reason]:
    """Return the reasons that are there: `present(vendor_reason(...), triton_reason(...))`."""
    return [reason for reason in reasons if reason is not None]
