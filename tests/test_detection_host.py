"""Facts of the host's software, found without importing any of it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from portamoe.detection import Files, _memory, host
from portamoe.detection.distributions import entry_points, version
from tests.host_recordings import recorded


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return an empty folder that is first on sys.path; packages there hide installed ones."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, name: str, number: str, entry: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{number}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n\nVersion: text\n")
    if entry:
        (folder / "entry_points.txt").write_text(entry)


def module(site: Path, name: str, **files: str) -> None:
    (site / name).mkdir()
    for file, text in ({"__init__": ""} | files).items():
        (site / name / f"{file}.py").write_text(text)


def hide(monkeypatch, *names: str) -> None:
    find = host.importlib.util.find_spec
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda n: None if n in names else find(n))


def test_versions_are_those_of_importlib_metadata():
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        assert version(name) == importlib.metadata.version(name), name
    assert version("no-such-distribution") is None


def test_names_are_compared_as_pypi_does(site):
    install(site, "Some.Odd_name", "1.2")
    assert version("some-odd-name") == version("Some_Odd.Name") == "1.2"


def test_a_folder_without_metadata_is_no_distribution(site):
    (site / "broken-1.0.dist-info").mkdir()
    assert version("broken") is None


def test_entry_points_of_one_group(site):
    install(site, "a", "1", "[console_scripts]\nx = a:x\n[portamoe.backends]\nfast = a.b:C [extra]\n# no = a:b\n")
    install(site, "b", "1", "[portamoe.backends.other]\ny = b:y\n")
    assert list(entry_points("portamoe.backends")) == [("fast", "a.b:C")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "from typing import Optional\n__version__ = '2.9.1+rocm6.4'\nhip: Optional[str] = '6.4.43484'\n"
            "cuda: Optional[str] = None\n",
            {"version": "2.9.1+rocm6.4", "hip": "6.4.43484", "cuda": None},
        ),
        ("__version__ = '2.11.0+cu130'\ncuda = '13.0'\nhip = None\n", ("2.11.0+cu130", None, "13.0")),
        ('__version__ = "2.6.0"  # a comment\n', ("2.6.0", None, None)),
        ("raise RuntimeError('never executed')\n__version__ = '1'\n", ("1", None, None)),
    ],
)
def test_torch_is_read_not_imported(site, text, expected):
    module(site, "torch", __init__="raise RuntimeError('imported')", version=text)
    if isinstance(expected, tuple):
        expected = dict(zip(("version", "hip", "cuda"), expected, strict=True))
    loaded = "torch" in sys.modules
    saved = sys.modules.pop("torch", None)
    try:
        assert host.torch() == expected
        assert "torch" not in sys.modules
    finally:
        if loaded:
            sys.modules["torch"] = saved


def test_the_installed_torch():
    assert host.torch()["version"] == version("torch")


def test_torch_not_installed(monkeypatch):
    hide(monkeypatch, "torch")
    assert host.torch() is None


def test_triton_is_known_by_its_module(site, monkeypatch):
    saved = sys.modules.pop("triton", None)
    try:
        module(site, "triton", __init__="__version__ = '3.5.1'\nraise RuntimeError('imported')\n")
        assert host.triton() == "3.5.1"
        (site / "triton/__init__.py").write_text("")
        install(site, "pytorch-triton-rocm", "3.4.0")
        monkeypatch.setattr(host, "TRITON_NAMES", ("pytorch-triton-rocm",))
        assert host.triton() == "3.4.0"
        hide(monkeypatch, "triton")
        assert host.triton() is None
    finally:
        if saved is not None:
            sys.modules["triton"] = saved


def test_two_distributions_of_one_module_are_a_problem():
    names = {"torch": "2.9", "triton": "3.9.0", "pytorch-triton-rocm": "3.5.1"}
    (problem,) = recorded("lumi-g", distributions=names).host.problems
    assert problem.what == "triton"
    assert "pytorch-triton-rocm" in problem.value


def test_environment_keeps_what_matters_and_no_secrets():
    env = {
        "HIP_VISIBLE_DEVICES": "0",
        "NCCL_NET_GDR_LEVEL": "3",
        "FI_CXI_RX_MATCH_MODE": "hybrid",
        "SLURM_GPUS_ON_NODE": "8",
        "PORTAMOE_BACKEND": "torch",
        "TRITON_CACHE_DIR": "/local/x",
        "GPU_DEVICE_ORDINAL": "0",
        "HOME": "/root",
        "FIGURE": "no",
        "AITER_TOKEN": "secret",
        "NCCL_API_KEY": "secret",
        "PORTAMOE_PASSWORD": "secret",
        "HSA_PROXY": "http://user:secret@host",
    }
    kept = host.environment(env)
    assert sorted(kept) == sorted(list(env)[:7])
    assert "secret" not in str(kept)


def test_rocm_version_file(monkeypatch, tmp_path):
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info/version").write_text("6.4.4-129\n")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert host.rocm("absent", amd=False, driver=None) == {"version": "6.4.4", "kfd": "absent", "driver": None}


def test_no_rocm(monkeypatch):
    monkeypatch.setattr(host, "_rocm_version", lambda: None)
    assert host.rocm("absent", amd=False, driver=None) is None
    # The kernel shows GPUs but the container was started without the device.
    assert host.rocm("absent", amd=True, driver=None)["kfd"] == "absent"


def test_ptxas_is_read_as_it_would_answer():
    facts = host.ptxas()
    if facts is None:
        pytest.skip("no ptxas on this machine")
    answer = subprocess.run([facts["path"], "--version"], capture_output=True, text=True, check=True).stdout
    assert f"release {facts['version']}," in answer
    help_text = subprocess.run([facts["path"], "--help"], capture_output=True, text=True, check=True).stdout
    listed = set(re.findall(r"sm_\d+[af]?", help_text))
    assert set(facts["targets"]) == {target for target in listed if int(re.sub(r"\D", "", target)) >= 75}


def test_ptxas_named_by_triton_comes_first(monkeypatch, tmp_path):
    text = b"\0Cuda compilation tools, release 13.5, V13.5.37\0\0sm_90a\0sm_107f\0sm_107\0xsm_61\0"
    (tmp_path / "ptxas").write_bytes(text)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    assert host.ptxas() == {
        "version": "13.5",
        "targets": ["sm_90a", "sm_107", "sm_107f"],
        "path": str(tmp_path / "ptxas"),
    }
    (tmp_path / "ptxas").write_bytes(b"")
    assert (host.ptxas() or {}).get("path") != str(tmp_path / "ptxas")


def test_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    mounts = f"/dev/sda / ext4 rw 0 0\nlustre {tmp_path}/far lustre rw 0 0\n"
    (tmp_path / "file").touch()
    env = {"TRITON_CACHE_DIR": f"{tmp_path}/far/triton", "PORTAMOE_CACHE_DIR": f"{tmp_path}/file/below"}
    caches = host.caches(env, mounts)
    assert caches["TRITON_CACHE_DIR"] == {
        "path": f"{tmp_path}/far/triton",
        "writable": True,
        "set": True,
        "filesystem": "lustre",
    }
    assert caches["PORTAMOE_CACHE_DIR"]["writable"] is False
    assert caches["AITER_JIT_DIR"]["path"] == f"{tmp_path}/.aiter/jit"
    assert caches["AITER_JIT_DIR"]["filesystem"] == "ext4"
    assert not (tmp_path / "far").exists()  # looking writes nothing


def test_a_cache_on_a_network_file_system_is_a_problem():
    caches = {"TRITON_CACHE_DIR": {"path": "/scratch/x", "writable": True, "set": True, "filesystem": "lustre"}}
    (problem,) = recorded("lumi-g", caches=caches).host.problems
    assert "set TRITON_CACHE_DIR" in problem.remedy


def test_no_home(monkeypatch):
    monkeypatch.setenv("HOME", "/nonexistent/home")
    caches = host.caches({}, "")
    assert caches["TRITON_CACHE_DIR"]["path"] == "/nonexistent/home/.triton/cache"
    assert caches["TRITON_CACHE_DIR"]["writable"] == (os.getuid() == 0)


MEMINFO = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    800 kB\nHugePages_Total:       0\n"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ({}, (1000, 800)),
        ({"max": "max", "current": "512"}, (1000, 800)),
        ({"max": str(600 * 1024), "current": str(500 * 1024)}, (600, 100)),
        # The page cache of the group is given back when memory is short.
        (
            {"max": str(600 * 1024), "current": str(500 * 1024), "stat": f"file 9\ninactive_file {300 * 1024}\n"},
            (600, 400),
        ),
    ],
)
def test_memory_is_that_of_the_control_group(tmp_path, cgroup, expected):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in cgroup.items():
        (tmp_path / f"sys/fs/cgroup/memory.{name}").write_text(text)
    assert _memory(Files(tmp_path)) == tuple(1024 * value for value in expected)


def test_no_meminfo(tmp_path):
    assert _memory(Files(tmp_path)) == (None, None)


@pytest.mark.parametrize("module", ["no_such_package.detect", "portamoe.no_such_module"])
def test_vendor_facts_without_the_vendor_folders(monkeypatch, module):
    monkeypatch.setattr(host, "VENDOR_FACTS", {"torch": (module, "detect"), "flashinfer": (module, "detect")})
    facts = host.vendor()
    assert facts["torch"] is None
    assert facts["flashinfer"] is None
    assert facts["triton"] == host.triton()


def test_a_broken_vendor_folder_is_not_taken_for_an_absent_one(monkeypatch, tmp_path):
    (tmp_path / "broken_folder.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(host, "VENDOR_FACTS", {"torch": ("broken_folder", "detect")})
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        host.vendor()


def test_a_package_is_described_by_its_vendor_folder(monkeypatch, tmp_path):
    (tmp_path / "described.py").write_text("def detect():\n    return {'version': '1.2'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(host, "VENDOR_FACTS", {"torch": ("described", "detect"), "absent": ("described", "detect")})
    assert host.vendor() == {"torch": {"version": "1.2"}, "absent": None, "triton": host.triton()}
