"""What the backend accepts and refuses, from facts alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from portamoe.spec import GPT_OSS, KIMI_K3
from rocm_moe.triton_unfused import BACKEND
from tests.host_recordings import device, recorded

EP8 = dataclasses.replace(KIMI_K3, local_experts=range(112))
TRITON = {"vendor": {"triton": "3.5.1"}, "torch": {"version": "2.9.1", "hip": "6.4", "cuda": None}}
CUDA = {"vendor": {"triton": "3.6.0"}, "torch": {"version": "2.11.0", "hip": None, "cuda": "13.0"}}


def reasons(spec, where):
    return [str(reason) for reason in BACKEND.check(spec, where)]


def test_a_recorded_mi250x_is_served():
    found = recorded("lumi-g").devices[0]
    assert found.arch == "gfx90a"
    assert reasons(EP8, found) == []
    assert BACKEND.only_on_request(EP8, found) is None


def test_a_gpu_that_cannot_be_opened_is_named():
    found = recorded("lumi-g-no-access").devices[0]
    assert "/dev/kfd" in reasons(EP8, found)[0]


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"])
def test_amd_targets(arch):
    assert reasons(EP8, device("amd", arch, **TRITON)) == []


@pytest.mark.parametrize("arch", ["gfx803", "gfx906", "gfx908", "gfx1030", "gfx1250", "gfx90", "gfx90a1"])
def test_other_amd_targets_are_refused_with_a_remedy(arch):
    (reason,) = reasons(EP8, device("amd", arch, **TRITON))
    assert arch in reason
    assert "use the backend torch" in reason


@pytest.mark.parametrize(("arch", "served"), [("sm_80", True), ("sm_90", True), ("sm_120", True), ("sm_75", False)])
def test_nvidia(arch, served):
    assert (reasons(EP8, device("nvidia", arch, **CUDA)) == []) == served


def test_the_vendor_is_part_of_every_comparison():
    assert any("CUDA build" in r for r in reasons(EP8, device("nvidia", "sm_90", **TRITON)))
    assert any("ROCm build" in r for r in reasons(EP8, device("amd", "gfx90a", **CUDA)))


def test_a_cpu_only_interprets_and_only_on_request():
    facts = {"vendor": {"triton": "3.9.0"}, "torch": {"version": "2.13.0", "hip": None, "cuda": None}}
    device_reason, interpret_reason = reasons(EP8, device("cpu", "cpu", **facts))
    assert "needs vendor amd or nvidia" in device_reason
    assert "TRITON_INTERPRET" in interpret_reason
    interpreting = device("cpu", "cpu", env={"TRITON_INTERPRET": "1"}, **facts)
    assert reasons(EP8, interpreting) == []
    assert BACKEND.only_on_request(EP8, interpreting) is not None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weight_format": "nvfp4"}, "mxfp4"),
        ({"weight_format": "bf16"}, "mxfp4"),
        ({"activation_format": "mxfp8"}, "bf16"),
    ],
)
def test_other_formats_are_refused(change, word):
    (reason,) = reasons(dataclasses.replace(EP8, **change), device("amd", "gfx90a", **TRITON))
    assert word in reason


def test_software_and_memory():
    assert "3.3" in reasons(EP8, device("amd", "gfx90a", **{**TRITON, "vendor": {"triton": "3.2.0"}}))[0]
    assert "not installed" in reasons(EP8, device("amd", "gfx90a", **{**TRITON, "vendor": {"triton": None}}))[0]
    small = dataclasses.replace(device("amd", "gfx90a", **TRITON), memory_bytes=10**9)
    assert any("memory" in reason for reason in reasons(EP8, small))
    assert reasons(GPT_OSS, device("amd", "gfx90a", **TRITON)) == []


def test_looking_imports_neither_torch_nor_triton():
    code = (
        "import sys; from rocm_moe.triton_unfused import BACKEND; from portamoe.spec import KIMI_K3; "
        "from portamoe.device import Device, Host; "
        "BACKEND.check(KIMI_K3, Device('amd', 'gfx90a', 0, 'x', Host('x86_64', '3.12'))); "
        "BACKEND.workspace_bytes(KIMI_K3, 64, 64); "
        "assert not {'torch', 'triton'} & set(sys.modules), sorted(sys.modules)"
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={"PYTHONPATH": f"{root / 'common'}:{root}", "PATH": ""},
        timeout=60,
    )
