"""The block's kernels without a GPU: values under Triton's interpreter, and that they compile without spilling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.kernels
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: One rounding to bf16.
ROUNDED = 0.0025


def lines(script: str, *arguments: str) -> dict[str, dict]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "common"), str(ROOT))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / script), *arguments]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    found = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case" if "case" in line else "kernel"): line for line in found}


@pytest.fixture(scope="module")
def values() -> dict[str, dict]:
    return lines("interpreted_block.py")


@pytest.mark.parametrize(
    ("case", "bound"), [("logits", 1e-6), ("situ", ROUNDED), ("situ_float32", 1e-6), ("norms", ROUNDED)]
)
def test_values(values, case, bound):
    assert values[case]
    assert {name: value for name, value in values[case].items() if not value <= bound} == {}


@pytest.mark.parametrize("case", ["routes", "ties"])
def test_choices_are_those_of_the_router(values, case):
    assert values[case]
    assert [name for name, same in values[case].items() if not same] == []


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_103", "gfx90a", "gfx942", "gfx1100"])
def test_kernels_compile_and_do_not_spill(target):
    compiled = lines("compiled_block.py", target)
    assert len(compiled) == 4
    assert all(kernel["spills"] == 0 for kernel in compiled.values())
