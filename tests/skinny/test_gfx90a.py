"""The one-launch product for gfx90a: its judgement, the code that this rests on, and its values when interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from portamoe import render
from portamoe.probe import capabilities
from rocm_moe import skinny_gemv
from rocm_moe.evidence.clock_model import MACHINES
from tests.host_recordings import HOSTS, device

MACHINE = MACHINES["gfx90a"]
ROOT = Path(__file__).parents[2]
LATENT = (3584, 7168)


def test_one_launch_gains_what_the_second_costs_while_weights_stream():
    found = skinny_gemv.judge(skinny_gemv.COMPILED[1], *LATENT, 1)
    streamed = 2 * (3584 * 7168 + 3584 + 7168) / (1.6e12 * 0.85)
    assert found.limit == "HBM"
    assert found.one == pytest.approx(5e-6 + 1e-6 + streamed)
    partials = 16 * 3584 / (1.6e12 * 0.85)
    assert found.two == pytest.approx(2 * 6e-6 + streamed + partials)


def test_slow_code_is_judged_by_what_it_computes():
    slow = replace(skinny_gemv.COMPILED[1], step=5000)
    assert skinny_gemv.judge(slow, *LATENT, 1).limit == "compute"
    assert skinny_gemv.judge(slow, *LATENT, 1).gain < 1
    few = replace(skinny_gemv.COMPILED[1], vgprs=512)  # one wave at a time on each SIMD
    far = replace(MACHINE, latency_s=3e-6)
    assert skinny_gemv.judge(few, *LATENT, 1, far).limit == "latency"
    assert skinny_gemv.judge(skinny_gemv.COMPILED[1], *LATENT, 1, far).limit == "HBM"


@pytest.mark.parametrize(
    ("n", "k", "m", "served"),
    [
        (*LATENT, 1, True),
        (*LATENT, 8, True),
        (*LATENT, 9, False),  # VALU
        (896, 7168, 4, True),
        (20480, 7168, 1, False),  # a launch is less than 5 % of it
        (7168, 768, 1, False),  # K is no multiple of a wave's step
    ],
)
def test_served_is_what_gains_5_percent(n, k, m, served):
    assert skinny_gemv.worthwhile(n, k, m) is served


def test_reasons_carry_value_and_limit():
    with_triton = device("amd", "gfx90a", vendor={"triton": "3.4.0"})
    assert skinny_gemv.reasons(*LATENT, with_triton) == []
    odd = skinny_gemv.reasons(10, 100, device("amd", "gfx942"))
    assert [r.what for r in odd] == ["device", "K", "N", "triton"]


def test_the_probe_says_modelled():
    found = capabilities(root=HOSTS / "lumi-g")
    assert found.projections == (
        "linear: gfx90a: one-launch GEMV for 1 to 8 rows where it saves 5 %: modelled, unmeasured",
    )
    assert "modelled, unmeasured" in render.to_text(found.to_dict())
    assert capabilities(root=HOSTS / "mi300x").projections == ()


@pytest.mark.kernels
@pytest.mark.parametrize("m", [1, 3, 8])
def test_compiled_code_takes_no_more_than_the_judgement_says(m):
    pytest.importorskip("triton")
    from rocm_moe.evidence import isa
    from rocm_moe.triton_compat import compile_variant

    said = skinny_gemv.COMPILED[m]
    for warps, residual in ((4, True), (1, False)):
        compiled = compile_variant(skinny_gemv.variant(m, warps, residual=residual), "gfx90a")
        code = isa.parse(compiled.asm["amdgcn"])
        issue = skinny_gemv.issue_of(code, compiled.metadata.shared)
        assert code.scratch == 0
        assert code.loop.load_sizes == (16,) * (skinny_gemv.ROWS + m)
        assert issue.step <= 1.05 * said.step  # 5 %: another version of Triton
        assert issue.straight <= 1.05 * said.straight
        assert issue.vgprs <= 1.05 * said.vgprs


SCRIPT = """
import os, sys, json
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])
import interpreter
interpreter.patch()
import torch
torch.set_num_threads(1)
from rocm_moe._skinny_gemv_kernels import skinny_gemv_kernel as kernel
for n, k, m, residual in ((8, 1024, 1, False), (12, 512, 3, True), (16, 1536, 4, False), (32, 512, 7, True)):
    g = torch.Generator().manual_seed(n)
    x, w = (torch.randn(rows, k, generator=g).bfloat16() for rows in (m, n))
    added = torch.randn(m, n, generator=g).bfloat16()
    y = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    kernel[(n // 4,)](x, w, y, added, n, k, M=m, MP=1 << (m - 1).bit_length(), ROWS=4, THREADS=64, RESIDUAL=residual)
    truth = x.double() @ w.double().T + (added.double() if residual else 0)
    print(json.dumps(float((y.double() - truth).norm() / truth.norm())))
"""


@pytest.mark.kernels
def test_interpreted_values():
    pytest.importorskip("triton")
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "common"), str(ROOT))), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT / "tests" / "cuda")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    errors = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(errors) == 4
    assert max(errors) <= 2.2e-3  # few results: one rounding of each, not its mean
