"""NVIDIA devices from NVML through nvidia-ml-py: no CUDA context, safe to fork after.

Facts are gathered in the form a recording keeps: {"driver", "cuda", "source", "devices": [{"index", "name", "uuid",
"compute_capability", "memory_bytes", "memory_free_bytes", "mig"}]}.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from portamoe.decision import Reason
from portamoe.detection.files import Files

LIBRARY = "libnvidia-ml.so.1"
PROC = "/proc/driver/nvidia"
LOADER_CACHE = Path("/etc/ld.so.cache")


def read_nvml(files: Files) -> tuple[dict[str, Any] | None, list[Reason]]:
    """Return NVML's facts, or the few that procfs has, or None; and what went wrong.

    A machine without NVIDIA's driver library and without its kernel module is no problem.
    """
    kernel_module = files.readable_text(f"{PROC}/version") is not None
    if not (kernel_module or _is_worth_a_try(files)):
        return None, []
    if not _library_loads():
        if not kernel_module:
            return None, []
        remedy = "containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return read_procfs(files), [Reason("NVML", f"{LIBRARY} not found", "the driver's library", remedy)]
    if not _package_is_there():
        value, limit = "the Python package nvidia-ml-py is not installed", "nvidia-ml-py"
        reason = Reason("NVML", value, limit, "pip install nvidia-ml-py")
        return read_procfs(files) if kernel_module else None, [reason]
    try:
        return _query(), []
    except Exception as error:  # noqa: BLE001 - whatever a broken driver or another pynvml throws
        text = f"{type(error).__name__}: {error}"
        advice = "repair the driver (nvidia-smi shows the same error)" if kernel_module else None
        return None, [Reason("NVML", text, "a working NVIDIA driver", advice)]


def _is_worth_a_try(files: Files) -> bool:
    """Is there a sign of a driver or its library? Loading ctypes to find none costs a tenth of `import portamoe`."""
    if any(name.startswith(("nvidia", "nvhost", "dxg")) for name in files.names("/dev")):  # dxg: WSL
        return True
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if any(Path(folder, LIBRARY).exists() for folder in folders if folder):
        return True
    try:
        return LIBRARY.encode() in LOADER_CACHE.read_bytes()
    except OSError:
        return False


def _package_is_there() -> bool:
    try:
        return importlib.util.find_spec("pynvml") is not None
    except (ImportError, ValueError):  # a stub in sys.modules
        return False


def _library_loads() -> bool:
    import ctypes

    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def _query() -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
            "source": "nvml",
            "devices": [_device(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount())],
        }
    finally:
        pynvml.nvmlShutdown()


def _device(pynvml: Any, index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return {
        "index": index,
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "compute_capability": [int(part) for part in capability],
        **_memory(pynvml, handle),
        "mig": _mig(pynvml, handle),
    }


def _memory(pynvml: Any, handle: Any) -> dict[str, int | None]:
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:  # devices that share the host's memory (GB10) have no such figure
        return {"memory_bytes": None, "memory_free_bytes": None}
    return {"memory_bytes": int(info.total), "memory_free_bytes": int(info.free)}


def _mig(pynvml: Any, handle: Any) -> list[dict[str, Any]] | None:
    """Return the MIG instances of a device in MIG mode, None for one that is not."""
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return None
    instances = []
    for index in range(count):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError:  # slots that hold no instance
            continue
        uuid = _text(pynvml.nvmlDeviceGetUUID(instance))
        instances.append({"uuid": uuid, **_memory(pynvml, instance)})
    return instances


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def read_procfs(files: Files) -> dict[str, Any]:
    """Return names and UUIDs from /proc/driver/nvidia, which has neither compute capability nor memory."""
    devices: list[dict[str, Any]] = []
    for bus in sorted(files.names(f"{PROC}/gpus")):
        text = files.readable_text(f"{PROC}/gpus/{bus}/information") or ""
        values = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.M))
        devices.append(
            {
                "index": len(devices),
                "name": values.get("Model", "unknown NVIDIA device"),
                "uuid": values.get("GPU UUID"),
                "compute_capability": None,
                "memory_bytes": None,
            }
        )
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", files.readable_text(f"{PROC}/version") or "")
    return {
        "driver": version[1] if version else None,
        "cuda": None,
        "source": "procfs",
        "devices": devices,
    }


def cuda_devices(devices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the devices as CUDA counts them: the first instance stands for a GPU in MIG mode."""
    out: list[Mapping[str, Any]] = []
    for device in devices:
        instances = device.get("mig")
        if instances is None:
            out.append(device)
        elif instances:
            out.append(_instance(device, instances[0]))
    return out


def mig_instances(devices: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return every MIG instance as a device of its own, for CUDA_VISIBLE_DEVICES=MIG-<uuid>."""
    return [_instance(device, instance) for device in devices for instance in device.get("mig") or []]


def _instance(device: Mapping[str, Any], instance: Mapping[str, Any]) -> dict[str, Any]:
    return {**device, **instance, "name": f"{device['name']} MIG", "is_instance": True}
