"""The CuteDSL kernels compile for every NVIDIA arch of the plans, and their code holds what is claimed of it.

`make test-cute` runs this in an environment that has CuteDSL; without one there is nothing to test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_moe.skinny import cute_launch
from cuda_moe.skinny.cute_parameters import parse

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_107a")
#: Seconds for one arch: about 20 where nothing else runs.
LIMIT = 150

pytestmark = pytest.mark.skipif(cute_launch.available() is not None, reason="make test-cute brings CuteDSL")


def lines_of(script, *arguments):
    path = os.pathsep.join([str(ROOT / "common"), str(ROOT)])
    command = [sys.executable, str(HERE / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def compiled(arch):
    return [json.loads(line) for line in lines_of("compile_kernels.py", arch) if line.startswith("{")]


def test_a_host_function_receives_what_a_launch_passes():
    received = [line for line in lines_of("call_host.py") if line]
    assert received == [f"{first} 3 0 4 5 6 7" for first in (1 << 40, 2, 1 << 41)]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_compiles_to_what_it_claims(arch):
    rows = compiled(arch)
    assert len(rows) == 6
    for row in rows:
        case, facts = row["case"], row["facts"]
        told = json.dumps(row)
        assert facts["target"] == arch, told
        assert facts["elf"], told
        assert facts["entries"] == 1, told
        assert facts["spilled"] == 0, told
        assert (facts["wait"], facts["launch_dependents"]) == ((1, 1) if case.get("pdl") else (0, 0)), told
        if case.get("pdl"):
            assert facts["weights_before_wait"], told
            assert facts["x_after_wait"], told
        if case["variant"] == "cute_gemv":
            steps = case["k"] // (8 * case["threads"])
            assert facts["stream"] == steps * case["outputs"], told
            assert facts["fma"] == 8 * steps * case["outputs"] * case["m"], told
            assert facts["mma"] == facts["cp_async"] == facts["far"] == 0, told
        else:
            options = {"variant", "n", "k", "m", "residual", "pdl"}
            p = parse("cute_mma", {name: value for name, value in case.items() if name not in options})
            steps = p.turns(case["k"]) * p.chunk // 32
            copies = (p.stages + p.turns(case["k"])) * p.rows * p.chunk // 256
            assert facts["stream"] == 0, told
            assert facts["mma"] == 2 * steps * p.row_tiles * (1 if case["m"] <= 8 else 2), told
            assert facts["cp_async"] == copies, told
            assert (facts["far"] > 0) == (p.split > 1), told
