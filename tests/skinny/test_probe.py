"""What the probe says about projections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portamoe import render
from portamoe.probe import capabilities
from tests.host_recordings import HOSTS

ROOT = Path(__file__).parents[2]


def lines(host):
    return capabilities(root=HOSTS / host).projections


def test_rubin_is_inherited_and_unmeasured_in_text_and_json():
    found = capabilities(root=HOSTS / "rubin-flashinfer-0.7.2")
    expected = "linear: sm107 uses sm103's winners: inherited, unmeasured"
    report = found.to_dict()
    assert expected in report["projections"]
    assert json.loads(render.to_json(report))["projections"] == list(found.projections)
    assert f"  {expected}\n" in render.to_text(report)


def test_an_h200_has_a_measured_plan_and_lacks_cutedsl():
    text = "\n".join(lines("h200"))
    assert "linear: sm90: measured (NVIDIA H200, " in text
    assert "linear: without cute_mma, cute_gemv: nvidia-cutlass-dsl: not installed" in text


@pytest.mark.parametrize("host", ["cpu-only", "mi300x"])
def test_nothing_is_said_where_torch_serves_all(host):
    found = capabilities(root=HOSTS / host)
    assert found.projections == ()
    assert "projections" not in render.to_text(found.to_dict())


def test_the_probe_imports_neither_torch_nor_triton():
    code = (
        "import sys\nfrom portamoe.probe import capabilities\n"
        f"print(len(capabilities(root={str(HOSTS / 'rubin-flashinfer-0.7.2')!r}).projections))\n"
        "print([n for n in ('torch', 'triton', 'cutlass') if n in sys.modules])"
    )
    path = os.pathsep.join((str(ROOT / "common"), str(ROOT)))
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    count, imported = child.stdout.split("\n")[:2]
    assert int(count) >= 1
    assert imported == "[]"
