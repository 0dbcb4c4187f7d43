"""Values of the fused backend without a GPU: index arithmetic, masks, sort, sums and tails under the interpreter."""

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


def _names() -> list[str]:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "CASES":
            return [key.value for key in node.value.keys]
    raise AssertionError("no CASES")


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "common"), str(ROOT))), "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert child.returncode == 0, child.stderr[-2000:]
    return {line.pop("case"): line for line in lines}


@pytest.mark.parametrize("name", _names())
def test_case(results, name):
    result = results[name]
    assert "failed" not in result, result["failed"]
    if "rms" in result:
        # h, y where there is one, and the result are rounded to bf16.
        assert result["rms"] <= 0.0035
        assert result["max"] <= 0.025
    else:
        assert all(result.values())
