"""A ROCm platform of one arch for vLLM, without a GPU: one stub module and three settings, before vLLM is imported."""

import os
import sys
import types

import pytest

ARCH = os.environ.get("PORTAMOE_FAKE_ARCH", "gfx90a")

#: Set by environment.py: the fake platform is for a process of its own, whatever vLLM is installed elsewhere.
WANTED = os.environ.get("PORTAMOE_VLLM_CONTRACT") == "1"

if not WANTED:
    collect_ignore_glob = ["test_*.py"]


def fake_amdsmi(arch):
    """Return what vLLM's ROCm platform asks amdsmi for."""
    stub = types.ModuleType("amdsmi")
    for name in (
        "init", "shut_down", "get_gpu_device_uuid", "get_gpu_memory_total", "topo_get_link_type",
        "topo_get_numa_node_number",
    ):  # fmt: skip
        setattr(stub, f"amdsmi_{name}", lambda *_: None)
    stub.AmdSmiException = type("AmdSmiException", (Exception,), {})
    stub.AmdSmiMemoryType = types.SimpleNamespace(VRAM=0)
    stub.amdsmi_get_processor_handles = lambda: [0]
    stub.amdsmi_get_gpu_asic_info = lambda _: {"target_graphics_version": arch}
    return stub


def fake_platform(arch=ARCH):
    """Make vLLM believe in one AMD GPU of `arch`, whose custom operators run on the CPU."""
    import torch

    torch.set_num_threads(1)
    sys.modules["amdsmi"] = fake_amdsmi(arch)
    from vllm.platforms import current_platform

    assert current_platform.is_rocm()
    type(current_platform).dispatch_key = "CPU"  # before vLLM registers its operators
    torch.accelerator.empty_cache = lambda: None  # the workspace manager calls it when it grows


if WANTED:
    fake_platform()


@pytest.fixture(scope="session", autouse=WANTED)
def vllm_loaded():
    """Load the installed plug-ins as vLLM does, and make its workspace manager."""
    import torch
    from vllm.plugins import load_general_plugins
    from vllm.v1.worker.workspace import init_workspace_manager

    load_general_plugins()
    init_workspace_manager(torch.device("cpu"))


@pytest.fixture
def torch_backend(monkeypatch):
    """Ask for portamoe's backend torch, the one that computes on this machine."""
    monkeypatch.setenv("PORTAMOE_BACKEND", "torch")
