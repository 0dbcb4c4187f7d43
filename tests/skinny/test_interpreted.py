"""Values of the Triton kernels without a GPU: index arithmetic, masks, padding, sums over pieces of K."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.kernels
SCRIPT = Path(__file__).with_name("interpreted_cases.py")
ROOT = SCRIPT.parents[2]
#: Of one rounding to bf16, as issue and documentation promise; a wrong index gives about 1.
TOLERANCE = 2e-3


def _names() -> list[str]:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    cases = next(n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", None) == "CASES")
    return [key.value for key in cases.value.keys]


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "common"), str(ROOT))), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert child.returncode == 0, child.stderr[-2000:]
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


@pytest.mark.parametrize("name", _names())
def test_values(results, name):
    assert results[name]["rms"] <= TOLERANCE


@pytest.mark.parametrize("name", _names())
def test_counters_are_zero_again(results, name):
    assert results[name]["counters"] == 0
