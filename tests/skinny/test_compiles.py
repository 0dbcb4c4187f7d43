"""The Triton kernels compile for every NVIDIA target without a GPU, and nothing spills."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from cuda_moe.skinny import compile_check

pytestmark = pytest.mark.kernels
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("capability", compile_check.TARGETS)
def test_target(capability, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "common"), str(ROOT))))  # of the child process
    assert compile_check.main(["--targets", str(capability)]) == 0, capsys.readouterr().out


def test_what_is_launched_is_on_its_way_in_16_byte_pieces():
    from cuda_moe.skinny import launch
    from cuda_moe.skinny.parameters import TritonGemv, TritonMma
    from cuda_moe.triton_compat import compile_kernel

    gemv = launch.source(TritonGemv(2, 4, 1), launch.Variant(1, True, False, False))
    ptx = compile_kernel(gemv, 90).asm["ptx"]
    assert ptx.count(".v4.b32") >= 3  # two rows of w and x
    mma = launch.source(TritonMma(16, 4, 64, 4), launch.Variant(8, True, False, True))
    ptx = compile_kernel(mma, 90).asm["ptx"]
    assert "cp.async.cg" in ptx
    assert "mma.sync.aligned.m16n8k16" in ptx
    assert ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg")
