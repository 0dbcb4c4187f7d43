"""Finding out what is there: live or replayed, without a GPU context and without importing torch."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from portamoe.decision import Reason
from portamoe.detection import host as software
from portamoe.detection import kfd, nvml, visibility
from portamoe.detection.files import Files
from portamoe.detection.recording import SCHEMA, DetectionError, load, save
from portamoe.device import Device, Host

__all__ = ["Detection", "DetectionError", "detect", "record"]

CGROUP = "/sys/fs/cgroup"


@dataclass(frozen=True)
class Detection:
    """The host and the devices this process may use; the CPU is always the last of them."""

    host: Host
    devices: tuple[Device, ...]

    def device(self, name: str) -> Device:
        """Return the device that torch calls `name`: "cpu", "cuda", "cuda:1".

        Raises ValueError that lists the devices.
        """
        wanted = f"{name}:0" if name == "cuda" else name
        # A host with both vendors has two "cuda:0"; the first listed is the one of torch's build.
        for device in self.devices:
            if device.torch_name == wanted:
                return device
        there = ", ".join(f"{d.torch_name} ({d.name})" for d in self.devices)
        raise ValueError(f"there is no device {name!r}; visible here: {there}")


def detect(
    root: str | Path | None = None, env: Mapping[str, str] | None = None, *, toolchain: bool = False
) -> Detection:
    """Return the host and its devices; the plain call is cached.

    root:       folder of a recording to replay; the live machine's devices are not looked at then
    env:        variables to use in place of the live environment's
    toolchain:  read ptxas too where no NVIDIA device asks for it (35 to 50 MB of file)

    Raises DetectionError when that is impossible; what is merely broken or absent goes to `host.problems`.
    """
    if root is None and env is None and not toolchain:
        return _cached()
    return _detect(root, env, toolchain)


@functools.cache
def _cached() -> Detection:
    return _detect(None, None, False)


def _detect(root: str | Path | None, env: Mapping[str, str] | None, toolchain: bool) -> Detection:
    try:
        if root is None:
            files = Files()
            return build(live_facts(files, os.environ if env is None else env, toolchain), files)
        facts = load(Path(root))
        files = Files(Path(root), facts.get("unreadable", ()))
        return replay(facts, files, env)
    except DetectionError:
        raise
    except Exception as error:
        raise DetectionError(f"detection failed: {type(error).__name__}: {error}") from error


def record(folder: str | Path, env: Mapping[str, str] | None = None) -> None:
    """Write to `folder` what `detect(folder)` needs to come to the same result elsewhere.

    Raises FileExistsError when the folder holds anything, OSError when it cannot be written; existing files stay as
    they were.
    """
    files = Files()
    facts = live_facts(files, os.environ if env is None else env, toolchain=True)
    build(facts, files)  # reads the rest of sys and proc
    save(Path(folder), facts, files)


def live_facts(files: Files, env: Mapping[str, str], toolchain: bool) -> dict[str, Any]:
    """Gather all facts of this machine in the form of host.json."""
    nvml_facts, problems = nvml.read_nvml(files)
    driver = files.readable_text("/sys/module/amdgpu/version")
    amd = driver is not None or bool(files.names(kfd.NODES))
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "origin": "recorded with portamoe probe record",
        "system": software.system(Files()),
        "rocm": software.rocm(kfd.access(), amd, driver.strip() if driver else None),
        "nvml": nvml_facts,
        "problems": [problem.to_dict() for problem in problems],
    }
    skipped = set() if toolchain or nvml_facts else {"ptxas"}
    return {**facts, **_software(env, skipped)}


def _software(env: Mapping[str, str], have: Set[str]) -> dict[str, Any]:
    """Return the software facts of the live environment under the names that are not in `have`."""
    gather: dict[str, Callable[[], Any]] = {
        "machine": software.machine,
        "python": software.python,
        "env": lambda: software.environment(env),
        "torch": software.torch,
        "distributions": software.distributions,
        "ptxas": software.ptxas,
        "vendor": software.vendor,
        "caches": lambda: software.caches(env, Files().readable_text("/proc/self/mounts") or ""),
    }
    return {name: function() for name, function in gather.items() if name not in have}


def replay(facts: Mapping[str, Any], files: Files, env: Mapping[str, str] | None = None) -> Detection:
    """Build the result from a recording; software facts that it lacks are taken from the live environment.

    Devices, driver and memory are never taken from the live machine: without them in the recording there are none.
    """
    recorded = dict(facts) if env is None else {**facts, "env": dict(env)}
    missing = _software(recorded.get("env", os.environ), set(recorded))
    detection = build({**missing, **recorded}, files)
    host = replace(detection.host, recorded=str(files.root), live=tuple(missing))
    return Detection(host, tuple(replace(device, host=host) for device in detection.devices))


def build(facts: Mapping[str, Any], files: Files) -> Detection:
    """Turn the facts of host.json and the files of sysfs and procfs into a host and its devices."""
    env: Mapping[str, str] = facts.get("env") or {}
    rocm: Mapping[str, Any] | None = facts.get("rocm")
    problems = [Reason(**problem) for problem in facts.get("problems", ())]
    topology = kfd.read_topology(files, env)
    blocked = kfd.access_problem(rocm.get("kfd") if rocm else None, topology)
    amd = visibility.amd_visible([gpu.uuid for gpu in topology.gpus], env)
    problems += topology.problems
    if topology.gpus:
        problems += amd.problems
    if blocked:
        problems.append(blocked)
        amd = visibility.Visible((), "/dev/kfd cannot be opened")
    listed, nvidia = _nvidia(facts.get("nvml"), env)
    if facts.get("nvml"):
        problems += [*nvidia.problems, *_nvidia_problems(facts["nvml"], env)]
    total, free = _memory(files)
    host = Host(
        machine=facts["machine"],
        python=facts["python"],
        system=facts.get("system"),
        env=env,
        rocm=rocm,
        nvml={k: v for k, v in facts["nvml"].items() if k != "devices"} if facts.get("nvml") else None,
        torch=facts.get("torch"),
        distributions=facts.get("distributions") or {},
        ptxas=facts.get("ptxas"),
        vendor=facts.get("vendor") or {},
        caches=facts.get("caches") or {},
        visibility=_visibility(topology, amd, listed, nvidia),
        memory_bytes=total,
        memory_free_bytes=free,
        problems=(*problems, *software.software_problems(facts)),
    )
    amd_devices = [_amd_device(topology.gpus[at], i, host) for i, at in enumerate(amd.order)]
    nvidia_devices = [_nvidia_device(listed[at], i, host) for i, at in enumerate(nvidia.order)]
    torch_is_cuda = bool((host.torch or {}).get("cuda"))
    gpus = [*nvidia_devices, *amd_devices] if torch_is_cuda else [*amd_devices, *nvidia_devices]
    return Detection(host, (*gpus, _cpu_device(files, host)))


def _visibility(
    topology: kfd.Topology,
    amd: visibility.Visible,
    listed: list[Mapping[str, Any]],
    nvidia: visibility.Visible,
) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    if topology.gpus or topology.unreadable:
        out["amd"] = {"present": len(topology.gpus), "unreadable": topology.unreadable}
        out["amd"] |= {"visible": list(amd.order), "because": amd.because}
    if listed:
        out["nvidia"] = {"present": len(listed), "unreadable": 0}
        out["nvidia"] |= {"visible": list(nvidia.order), "because": nvidia.because}
    return out


def _nvidia(
    facts: Mapping[str, Any] | None, env: Mapping[str, str]
) -> tuple[list[Mapping[str, Any]], visibility.Visible]:
    """Return NVIDIA's devices as CUDA counts them and which of them are visible."""
    devices = [{"found_by": (facts or {}).get("source", "nvml"), **d} for d in (facts or {}).get("devices", ())]
    by_uuid = env.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    listed = nvml.mig_instances(devices) if by_uuid else nvml.cuda_devices(devices)
    visible = visibility.nvidia_visible([device.get("uuid") for device in listed], env)
    # One process uses one MIG instance (NVIDIA MIG user guide, "CUDA device enumeration").
    mig = [at for at in visible.order if listed[at].get("is_instance")]
    return listed, replace(visible, order=tuple(at for at in visible.order if at not in mig[1:]))


def _nvidia_problems(facts: Mapping[str, Any], env: Mapping[str, str]) -> list[Reason]:
    devices = facts.get("devices", ())
    out = []
    if len({str(d.get("compute_capability")) for d in devices}) > 1:
        order = env.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
        if order != "PCI_BUS_ID":
            remedy = "export CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA counts the devices as listed here"
            out.append(Reason("CUDA_DEVICE_ORDER", order, "PCI_BUS_ID on a host with unlike devices", remedy))
    if any(d.get("compute_capability") is None for d in devices):
        remedy = "make NVML available (pip install nvidia-ml-py; containers: driver capability 'utility')"
        out.append(Reason("compute capability", "unknown without NVML", None, remedy))
    return out


def _amd_device(gpu: kfd.Gpu, index: int, host: Host) -> Device:
    return Device(
        vendor="amd",
        arch=gpu.arch,
        index=index,
        name=gpu.name,
        host=host,
        memory_bytes=gpu.memory_bytes,
        memory_free_bytes=gpu.memory_free_bytes,
        uuid=gpu.uuid,
        found_by="kfd",
        compute_units=gpu.compute_units,
    )


def _nvidia_device(facts: Mapping[str, Any], index: int, host: Host) -> Device:
    capability = facts.get("compute_capability")
    return Device(
        vendor="nvidia",
        arch=f"sm_{capability[0]}{capability[1]}" if capability else "unknown",
        index=index,
        name=facts["name"],
        host=host,
        memory_bytes=facts.get("memory_bytes"),
        memory_free_bytes=facts.get("memory_free_bytes"),
        uuid=facts.get("uuid"),
        found_by=facts["found_by"],
    )


def _cpu_device(files: Files, host: Host) -> Device:
    first_core = files.readable_text("/proc/cpuinfo", limit=2048) or ""
    name = re.search(r"^model name\s*:\s*(.+)$", first_core, re.M)
    return Device(
        vendor="cpu",
        arch="cpu",
        index=0,
        name=name[1] if name else host.machine,
        host=host,
        memory_bytes=host.memory_bytes,
        memory_free_bytes=host.memory_free_bytes,
    )


def _memory(files: Files) -> tuple[int | None, int | None]:
    """Return total and available bytes of RAM, within the limit of this process's control group."""
    values = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", files.readable_text("/proc/meminfo") or "", re.M)
    }
    total, free = values.get("MemTotal"), values.get("MemAvailable")
    limit = (files.readable_text(f"{CGROUP}/memory.max") or "").strip()
    used = (files.readable_text(f"{CGROUP}/memory.current") or "").strip()
    if total is None or free is None or not (limit.isdigit() and used.isdigit()):
        return total, free
    cached = re.search(
        r"^inactive_file (\d+)$", files.readable_text(f"{CGROUP}/memory.stat") or "", re.M
    )  # page cache that the kernel gives back
    left = int(limit) - int(used) + (int(cached[1]) if cached else 0)
    return min(total, int(limit)), min(free, max(left, 0))
