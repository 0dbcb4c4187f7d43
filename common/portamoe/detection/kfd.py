"""AMD devices from the kernel's KFD topology in sysfs: no ROCm, no GPU context.

/sys/class/kfd/kfd/topology/nodes/<n>/properties holds `name value` lines; a GPU node has vendor_id 4098 and
gfx_target_version != 0. HIP counts GPU nodes in ascending numeric order. The kernel answers EPERM for devices of other
jobs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from portamoe.decision import Reason
from portamoe.detection.files import Files, properties

NODES = "/sys/class/kfd/kfd/topology/nodes"
DEVICE_FILE = Path("/dev/kfd")
AMD = 4098  # 0x1002, PCI vendor

#: PCI device id -> name shown to people (pci.ids; ROCm rocjitsu configs). Nothing is decided by it.
NAMES: Mapping[int, str] = {
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X/MI250",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x75A0: "AMD Instinct MI350X",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU node: its arch after HSA_OVERRIDE_GFX_VERSION, sizes in bytes, None where sysfs does not say."""

    node: int
    arch: str
    name: str
    uuid: str | None
    memory_bytes: int | None
    memory_free_bytes: int | None
    compute_units: int | None


@dataclass(frozen=True)
class Topology:
    """All GPU nodes in HIP's order, how many nodes could not be read, and what looks odd."""

    gpus: tuple[Gpu, ...] = ()
    unreadable: int = 0
    problems: tuple[Reason, ...] = ()


def decode_target(version: int) -> str:
    """Return the target of KFD's gfx_target_version: major·10000 + minor·100 + step, minor and step in hex.

    90010 is gfx90a, 90402 gfx942, 110501 gfx1151.
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def access() -> str:
    """Return "openable", "permission denied" or "absent" for /dev/kfd, without opening it."""
    if not DEVICE_FILE.exists():
        return "absent"
    return "openable" if os.access(DEVICE_FILE, os.R_OK | os.W_OK) else "permission denied"


def access_problem(state: str | None, topology: Topology) -> Reason | None:
    """Return why GPUs that sysfs shows, or hides from this job, cannot be used, None if all is well.

    state:  as `access` returns it; None where a recording does not say
    """
    gpus, hidden = len(topology.gpus), topology.unreadable
    into_container = "start the container with --device /dev/kfd --device /dev/dri"
    if gpus and state == "absent":
        return Reason("/dev/kfd", f"absent, {gpus} AMD GPUs cannot be used", "there", into_container)
    if gpus and state not in {None, "openable"}:
        remedy = "join the group that owns /dev/kfd (render or video; containers: --group-add)"
        return Reason("/dev/kfd", f"{state}, {gpus} AMD GPUs cannot be used", "openable", remedy)
    if hidden and not gpus:
        remedy = f"ask the scheduler for GPUs; {into_container}" if state == "absent" else "ask the scheduler for GPUs"
        return Reason("AMD GPUs", f"{hidden} there, none given to this job", "at least one", remedy)
    return None


def read_topology(files: Files, env: Mapping[str, str]) -> Topology:
    """Read every node; one that may not be read is counted, not an error."""
    gpus: list[Gpu] = []
    problems: list[Reason] = []
    unreadable = 0
    user_node = 0  # the runtime numbers only the nodes it can read (ROCR libhsakmt, topology.c)
    for node in sorted(int(name) for name in files.names(NODES) if name.isdigit()):
        try:
            text = files.text(f"{NODES}/{node}/properties")
        except PermissionError:
            unreadable += 1
            continue
        except OSError as error:
            problems.append(Reason(f"KFD node {node}", str(error), "readable properties", "see dmesg for amdgpu"))
            continue
        if text is None:
            continue
        values = properties(text)
        if values.get("vendor_id") == AMD and values.get("gfx_target_version", 0):
            gpu, problem = _gpu(files, env, node, user_node, values)
            gpus.append(gpu)
            problems += [problem] if problem else []
        user_node += 1
    return Topology(tuple(gpus), unreadable, tuple(problems))


def _gpu(
    files: Files, env: Mapping[str, str], node: int, user_node: int, values: Mapping[str, int]
) -> tuple[Gpu, Reason | None]:
    real = decode_target(values["gfx_target_version"])
    arch, problem = _override(env, user_node, real)
    memory = _memory(files, node, values)
    device_id = values.get("device_id", 0)
    per_cu = values.get("simd_per_cu", 0)
    unique = values.get("unique_id", 0)
    gpu = Gpu(
        node=node,
        arch=arch,
        name=NAMES.get(device_id, f"AMD {real} ({device_id:#06x})"),
        uuid=f"GPU-{unique:016x}" if unique else None,
        memory_bytes=memory,
        memory_free_bytes=_free(files, values.get("drm_render_minor"), memory),
        compute_units=values.get("simd_count", 0) // per_cu if per_cu else None,
    )
    return gpu, problem


def _override(env: Mapping[str, str], user_node: int, real: str) -> tuple[str, Reason | None]:
    name = f"HSA_OVERRIDE_GFX_VERSION_{user_node}"
    if name not in env:
        name = "HSA_OVERRIDE_GFX_VERSION"
    value = env.get(name)
    if value is None:
        return real, None
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", value)
    if not match:
        return real, Reason(name, value, "major.minor.step in decimals, 9.0.10 for gfx90a", f"unset {name}")
    major, minor, step = (int(part) for part in match.groups())
    arch = f"gfx{major}{minor:x}{step:x}"
    if arch == real:
        return real, None
    remedy = f"node {user_node} is treated as {arch}; unset {name} if its code does not run there"
    return arch, Reason(name, f"{value} ({arch})", f"{real}, what the driver reports", remedy)


def _memory(files: Files, node: int, values: Mapping[str, int]) -> int | None:
    """Bytes of VRAM: banks of heap type 1 or 2 (public and private frame buffer), else local_mem_size."""
    total = 0
    banks = f"{NODES}/{node}/mem_banks"
    for bank in sorted(files.names(banks)):
        text = files.readable_text(f"{banks}/{bank}/properties")
        bank_values = properties(text) if text else {}
        if bank_values.get("heap_type") in {1, 2}:
            total += bank_values.get("size_in_bytes", 0)
    return total or values.get("local_mem_size") or None


def _free(files: Files, render_minor: int | None, memory: int | None) -> int | None:
    if render_minor is None or memory is None:
        return None
    text = files.readable_text(f"/sys/class/drm/renderD{render_minor}/device/mem_info_vram_used")
    if text is None or not text.strip().isdigit():
        return None
    return max(memory - int(text), 0)
