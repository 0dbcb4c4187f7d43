"""NVIDIA devices: NVML, procfs, and every way in which a driver can be broken."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path

import pytest

from portamoe.detection import nvml
from portamoe.detection.files import Files
from portamoe.detection.nvml import read_nvml
from tests.host_recordings import recorded

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 16
GPU UUID: \t GPU-8932f937-d72c-4106-c12f-20bd9faed9f6
Video BIOS: \t 96.00.BC.00.01
Bus Location: \t 0000:18:00.0
"""
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"


class NVMLError(Exception):
    pass


def fake_pynvml(devices, **changes):
    """Return a module `pynvml` over a list of devices: name, uuid, capability, memory, MIG instances."""
    module = types.ModuleType("pynvml")
    module.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
    module.opened = 0

    def count(step):
        module.opened += step

    def memory(handle):
        if handle.get("memory") is None:
            raise NVMLError("Not Supported")
        return types.SimpleNamespace(total=handle["memory"], free=handle["memory"] - 1)

    def mig_mode(handle):
        if "mig" not in handle:
            raise NVMLError("Not Supported")
        return (1, 1)

    def mig_handle(handle, index):
        if index >= len(handle["mig"]):
            raise NVMLError("Not Found")
        return handle["mig"][index]

    names = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: count(1),
        "nvmlShutdown": lambda: count(-1),
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13040,
        "nvmlDeviceGetCount": lambda: len(devices),
        "nvmlDeviceGetHandleByIndex": lambda i: devices[i],
        "nvmlDeviceGetName": lambda h: h["name"],
        "nvmlDeviceGetUUID": lambda h: h["uuid"],
        "nvmlDeviceGetCudaComputeCapability": lambda h: h["capability"],
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMigMode": mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": mig_handle,
        **changes,
    }
    vars(module).update(names)
    return module


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Return a function that makes a host: driver library, Python package and kernel module or not."""

    def make(*, library: bool, package: types.ModuleType | None, kernel: bool) -> Files:
        monkeypatch.setattr(nvml, "_library_loads", lambda: library)
        monkeypatch.setattr(nvml, "_is_worth_a_try", lambda _: library)
        monkeypatch.setitem(sys.modules, "pynvml", package)
        if kernel:
            write_proc(tmp_path)
        return Files(tmp_path)

    return make


def write_proc(root: Path) -> None:
    gpu = root / "proc/driver/nvidia/gpus/0000:18:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text(INFORMATION)
    (root / "proc/driver/nvidia/version").write_text(VERSION)


H200 = {"name": "NVIDIA H200", "uuid": "GPU-8932f937", "capability": (9, 0), "memory": 150 << 30}


def test_no_nvidia_at_all_is_no_problem(host):
    assert read_nvml(host(library=False, package=None, kernel=False)) == (None, [])


@pytest.mark.parametrize("sign", ["/dev/nvidiactl", "/dev/dxg", "the loader's cache", "LD_LIBRARY_PATH", None])
def test_signs_of_a_driver(monkeypatch, tmp_path, sign):
    for name in ("dev", "lib"):
        (tmp_path / name).mkdir()
    (tmp_path / "dev/null").touch()
    monkeypatch.setattr(nvml, "LOADER_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":/nonexistent:{tmp_path}/lib")
    if sign and sign.startswith("/dev"):
        (tmp_path / sign[1:]).touch()
    elif sign == "LD_LIBRARY_PATH":
        (tmp_path / "lib/libnvidia-ml.so.1").touch()
    elif sign:
        (tmp_path / "ld.so.cache").write_bytes(b"ld.so\0libc.so.6\0libnvidia-ml.so.1\0/usr/lib/libnvidia-ml.so.1\0")
    assert nvml._is_worth_a_try(Files(tmp_path)) is (sign is not None)


def test_a_library_without_a_loaded_driver_is_a_problem(host):
    def not_loaded():
        raise NVMLError("Driver Not Loaded")

    facts, (problem,) = read_nvml(host(library=True, package=fake_pynvml([], nvmlInit=not_loaded), kernel=False))
    assert facts is None
    assert "Driver Not Loaded" in problem.value


def test_a_working_driver(host):
    package = fake_pynvml([H200, {**H200, "uuid": b"GPU-bytes", "memory": None}])
    facts, problems = read_nvml(host(library=True, package=package, kernel=True))
    assert problems == []
    assert (facts["driver"], facts["cuda"], facts["source"]) == ("580.159.04", "13.4", "nvml")
    first, second = facts["devices"]
    assert first == {
        "index": 0,
        "name": "NVIDIA H200",
        "uuid": "GPU-8932f937",
        "compute_capability": [9, 0],
        "memory_bytes": 150 << 30,
        "memory_free_bytes": (150 << 30) - 1,
        "mig": None,
    }
    assert (second["uuid"], second["memory_bytes"]) == ("GPU-bytes", None)
    assert package.opened == 0  # NVML is shut down again


def test_library_missing_in_a_container(host):
    facts, (problem,) = read_nvml(host(library=False, package=None, kernel=True))
    assert problem.what == "NVML"
    assert "libnvidia-ml.so.1 not found" in problem.value
    assert "utility" in problem.remedy
    assert facts["driver"] == "580.159.04"
    assert facts["devices"][0]["name"] == "NVIDIA H200"
    assert facts["devices"][0]["uuid"].startswith("GPU-8932f937-d72c")


def test_python_package_missing(host, monkeypatch):
    files = host(library=True, package=None, kernel=True)
    monkeypatch.setattr(nvml, "_package_is_there", lambda: False)
    facts, (problem,) = read_nvml(files)
    assert problem.remedy == "pip install nvidia-ml-py"
    assert facts["source"] == "procfs"


@pytest.mark.parametrize("error", [NVMLError("Driver/library version mismatch"), OSError("x"), AttributeError("x")])
def test_a_broken_driver_is_a_reason(host, error):
    def broken():
        raise error

    facts, (problem,) = read_nvml(host(library=True, package=fake_pynvml([], nvmlInit=broken), kernel=True))
    assert facts is None
    assert str(error) in problem.value
    assert "nvidia-smi" in problem.remedy


def test_a_device_that_fails_leaves_nvml_closed(host):
    def broken(_):
        raise NVMLError("GPU is lost")

    package = fake_pynvml([H200], nvmlDeviceGetName=broken)
    facts, (problem,) = read_nvml(host(library=True, package=package, kernel=True))
    assert facts is None
    assert "GPU is lost" in problem.value
    assert package.opened == 0


def test_procfs_devices_have_no_capability_and_say_so():
    device = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "compute_capability": None, "memory_bytes": None}
    facts = {"driver": "580", "cuda": None, "source": "procfs", "devices": [device]}
    detection = recorded("h200", nvml=facts)
    assert (detection.devices[0].arch, detection.devices[0].capability) == ("unknown", None)
    assert detection.devices[0].found_by == "procfs"
    assert any(p.what == "compute capability" and "nvidia-ml-py" in p.remedy for p in detection.host.problems)


def mig_host(env, *devices):
    facts = [
        {"index": i, "compute_capability": [9, 0], "memory_bytes": 80 << 30, "name": "GPU", **device}
        for i, device in enumerate(devices)
    ]
    nvml_facts = {"driver": "580", "cuda": "13.0", "devices": facts}
    return [(d.uuid, d.memory_bytes) for d in recorded("h200", env, nvml=nvml_facts).devices[:-1]]


SLICES = [{"uuid": "MIG-a", "memory_bytes": 10 << 30}, {"uuid": "MIG-b", "memory_bytes": 20 << 30}]
SLICED = {"uuid": "GPU-0", "mig": SLICES}
WHOLE = {"uuid": "GPU-1", "mig": None}


def test_a_gpu_in_mig_mode_is_its_first_instance():
    assert mig_host({}, SLICED) == [("MIG-a", 10 << 30)]
    assert mig_host({}, SLICED, {**SLICED, "uuid": "GPU-2"}) == [("MIG-a", 10 << 30)]


def test_an_instance_by_uuid():
    assert mig_host({"CUDA_VISIBLE_DEVICES": "MIG-b"}, WHOLE, SLICED) == [("MIG-b", 20 << 30)]
    assert mig_host({"CUDA_VISIBLE_DEVICES": "MIG-b,MIG-a"}, SLICED) == [("MIG-b", 20 << 30)]
    assert mig_host({"CUDA_VISIBLE_DEVICES": "MIG-c"}, SLICED) == []


def test_a_gpu_without_instances_cannot_be_used():
    assert mig_host({}, {**SLICED, "mig": []}) == []
    assert mig_host({"CUDA_VISIBLE_DEVICES": "0"}, {**SLICED, "mig": []}, WHOLE) == [("GPU-1", 80 << 30)]


def test_unlike_devices_need_an_order():
    facts = {"driver": "580", "cuda": "13.0", "devices": [
        {"index": 0, "name": "a", "uuid": "GPU-0", "compute_capability": [8, 9], "memory_bytes": 1},
        {"index": 1, "name": "b", "uuid": "GPU-1", "compute_capability": [9, 0], "memory_bytes": 1}]}  # fmt: skip
    problems = recorded("h200", {}, nvml=facts).host.problems
    assert [p.what for p in problems] == ["CUDA_DEVICE_ORDER"]
    assert recorded("h200", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, nvml=facts).host.problems == ()


@pytest.mark.parametrize(
    ("name", "arch", "capability", "count"),
    [("h200", "sm_90", (9, 0), 1), ("b300", "sm_103", (10, 3), 8), ("rubin-flashinfer-0.7.2", "sm_107", (10, 7), 4)],
)
def test_recorded_hosts(name, arch, capability, count):
    gpus = recorded(name).devices[:-1]
    assert [(d.arch, d.capability, d.found_by) for d in gpus] == [(arch, capability, "nvml")] * count


def test_a_mixed_host_lists_the_vendor_of_torchs_build_first():
    device = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-0", "compute_capability": [9, 0], "memory_bytes": 1}
    nvml_facts = {"driver": "580", "cuda": "13.0", "devices": [device]}
    rocm = recorded("lumi-g", nvml=nvml_facts)
    assert [d.vendor for d in rocm.devices] == ["amd"] * 8 + ["nvidia", "cpu"]
    assert rocm.device("cuda:0").vendor == "amd"
    cuda = recorded("lumi-g", nvml=nvml_facts, torch={"version": "2.11.0+cu130", "hip": None, "cuda": "13.0"})
    assert [d.vendor for d in cuda.devices] == ["nvidia"] + ["amd"] * 8 + ["cpu"]
    assert cuda.device("cuda").arch == "sm_90"
