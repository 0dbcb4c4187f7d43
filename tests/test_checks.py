"""The reasons that backends share: each is there exactly when something is wrong, with value, limit and remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portamoe import checks
from portamoe.decision import Reason
from portamoe.spec import GPT_OSS, KIMI_K3
from tests.host_recordings import device


@pytest.mark.parametrize(
    ("version", "minimum", "enough"),
    [
        ("3.4.0", "3.4", True),
        ("3.4", "3.4.0", True),
        ("3.10.0", "3.9", True),
        ("3.3.1", "3.4", False),
        ("2.9.0a0+git1234", "2.9", True),  # a vendor's build of 2.9, which PEP 440 puts before it
        ("2.8.0+rocm6.4", "2.9", False),
        ("v0.1.20.post1", "0.1.20", True),
        ("unknown", "0.1", False),
    ],
)
def test_at_least(version, minimum, enough):
    assert checks.at_least(version, minimum) is enough


def test_vendor():
    assert checks.vendor_reason(device("amd"), "amd", "cpu") is None
    assert checks.vendor_reason(device("nvidia", "sm_90"), "amd") == Reason(
        "device", "nvidia sm_90", "vendor amd", "use a backend for nvidia devices"
    )
    blocked = Reason("/dev/kfd", "permission denied", "openable", "join the group render")
    reason = checks.vendor_reason(device("cpu", "cpu", problems=(blocked,)), "amd", "nvidia")
    assert reason.limit == "vendor amd or nvidia"
    assert "join the group render" in reason.remedy


def test_arch():
    assert checks.arch_reason(device(), {"gfx90a"}) is None
    assert checks.arch_reason(device(), {"gfx950", "gfx942"}, "use x") == Reason(
        "arch", "gfx90a", "gfx942, gfx950", "use x"
    )
    # A name that begins like another is another.
    assert checks.arch_reason(device("amd", "gfx90a"), {"gfx90"}) is not None


@pytest.mark.parametrize(
    ("torch", "where", "what"),
    [
        (None, ("cpu", "cpu"), "torch"),
        ({"version": "2.13.0+cpu", "hip": None, "cuda": None}, ("cpu", "cpu"), None),
        ({"version": "2.13.0+cpu", "hip": None, "cuda": None}, ("amd", "gfx90a"), "torch build"),
        ({"version": "2.11.0+cu130", "hip": None, "cuda": "13.0"}, ("amd", "gfx90a"), "torch build"),
        ({"version": "2.11.0+cu130", "hip": None, "cuda": "13.0"}, ("nvidia", "sm_90"), None),
        ({"version": "2.9.1+rocm6.4", "hip": "6.4", "cuda": None}, ("nvidia", "sm_90"), "torch build"),
        ({"version": "2.9.1+rocm6.4", "hip": "6.4", "cuda": None}, ("amd", "gfx90a"), None),
        ({"version": "2.5.1+rocm6.2", "hip": "6.2", "cuda": None}, ("amd", "gfx90a"), "torch"),
    ],
)
def test_torch(torch, where, what):
    reason = checks.torch_reason(device(*where, torch=torch), "2.6")
    assert (reason and reason.what) == what
    assert reason is None or (reason.limit and reason.remedy)


def test_distributions_and_triton():
    host = device(distributions={"pytorch-triton-rocm": "3.5.1"}, vendor={"triton": "3.5.1"}).host
    assert checks.distribution_reason(host, ["triton", "pytorch-triton-rocm"], "3.4") is None
    assert checks.distribution_reason(host, ["pytorch-triton-rocm"], "3.6").value == "3.5.1"
    assert checks.distribution_reason(host, ["flydsl"]) == Reason("flydsl", "not installed", None, "pip install flydsl")
    assert checks.triton_reason(host, "3.5") is None
    assert checks.triton_reason(host, "3.6").limit == ">= 3.6"
    assert checks.triton_reason(device().host, "3.4").value == "not installed"


def test_cache():
    caches = {
        "TRITON_CACHE_DIR": {"path": "/x", "writable": False},
        "AITER_JIT_DIR": {"path": "/y", "writable": True},
    }
    host = device(caches=caches).host
    assert "set TRITON_CACHE_DIR" in checks.cache_reason(host, "TRITON_CACHE_DIR").remedy
    assert checks.cache_reason(host, "AITER_JIT_DIR") is None
    assert checks.cache_reason(host, "NOT_LOOKED_AT") is None


@pytest.mark.parametrize(
    ("total", "free", "needed", "fits"),
    [
        (100, 50, 50, True),
        (100, 50, 51, False),
        (100, 0, 1, False),  # 0 is a value, not "unknown"
        (100, None, 100, True),
        (100, None, 101, False),
        (None, None, 1 << 60, True),
    ],
)
def test_memory(total, free, needed, fits):
    where = replace(device(), memory_bytes=total, memory_free_bytes=free)
    reason = checks.memory_reason(needed, where)
    assert (reason is None) is fits
    assert reason is None or "cuda:0" in reason.value


def test_multiple():
    assert checks.multiple_reason("intermediate_size", 384, 128) is None
    assert checks.multiple_reason("intermediate_size", 96, 128, "fewer ranks") == Reason(
        "intermediate_size", 96, "a multiple of 128", "fewer ranks"
    )


def test_weight_bytes():
    # Kimi-K3: 896 experts of 3 · 3584 · 3072 values, half a byte each and a scale byte for 32.
    assert checks.weight_bytes(KIMI_K3) == 896 * (3 * 3584 * 3072 // 2 + 3 * 3584 * 3072 // 32)
    assert checks.weight_bytes(replace(KIMI_K3, local_experts=range(112, 224))) == checks.weight_bytes(KIMI_K3) // 8
    assert checks.weight_bytes(replace(GPT_OSS, weight_format="bf16")) == 128 * 2 * 3 * 2880 * 2880
    nvfp4 = checks.weight_bytes(replace(KIMI_K3, weight_format="nvfp4"))
    assert nvfp4 == 896 * (3 * 3584 * 3072 // 2 + 3 * 3584 * 3072 // 16)


def test_present():
    one = Reason("x", 1)
    assert checks.present(None, one, None) == [one]
