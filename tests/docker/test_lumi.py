"""The job scripts for LUMI: they parse, start with the probe, and hold what LUMI's nodes ask for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

LUMI = Path(__file__).resolve().parents[2] / "docker/lumi"
#: First core of the seven beside each GCD, in GCD order.
FIRST_CORE = (49, 57, 17, 25, 1, 9, 33, 41)

each = pytest.mark.parametrize("name", ["one-node", "n-nodes"])


def text(name: str) -> str:
    return (LUMI / f"{name}.sbatch").read_text(encoding="utf-8")


def code(name: str) -> str:
    """Return the script without comments, continuation lines joined."""
    lines = [line for line in text(name).splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ")


@each
def test_parses(name: str) -> None:
    assert subprocess.run(["/bin/bash", "-n", LUMI / f"{name}.sbatch"], check=False).returncode == 0


@each
def test_no_ray_no_host_rocm_and_no_masked_gpus(name: str) -> None:
    script = code(name)
    assert not re.search(r"\bray\b|--rocm\b", script)
    assert "VISIBLE_DEVICES" not in script
    assert "--gpus-per-node=8" in text(name)


@each
def test_caches_are_on_the_nodes_tmp(name: str) -> None:
    script = code(name)
    assert "CACHE_ROOT=/tmp/$USER-portamoe-$SLURM_JOB_ID" in script
    variables = re.findall(r"SINGULARITYENV_(\w+)=\$CACHE_ROOT/(\w+)", script)
    assert {variable for variable, _ in variables} == {
        "PORTAMOE_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "MIOPEN_USER_DB_PATH",
        "MIOPEN_CUSTOM_CACHE_DIR",
    }
    made = re.search(r'mkdir -p "\$CACHE_ROOT"/\{([\w,]+)\}', script)
    assert made is not None
    assert {folder for _, folder in variables} == set(made[1].split(","))


def test_masks_are_the_cores_beside_each_gcd() -> None:
    masks = re.findall(r"0x[0-9a-f]{16}", code("one-node"))
    cores = [[bit for bit in range(64) if int(mask, 16) >> bit & 1] for mask in masks]
    assert cores == [list(range(first, first + 7)) for first in FIRST_CORE]


def test_several_nodes_use_the_slingshot_interfaces_and_torchrun() -> None:
    script = code("n-nodes")
    assert "NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3" in script
    assert re.search(r"^export GLOO_SOCKET_IFNAME=hsn0$", script, re.MULTILINE)
    assert "torch.distributed.run" in script
    assert "--numa-binding=exclusive" in script
    assert "FI_" not in script, "FI_ variables are comments only: LUMI's recipes set none"


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Stand-ins for Slurm and SingularityCE that write down what they are asked; srun starts its command once."""
    log = tmp_path / "log"
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    programs = {
        "module": "exit 0",
        "scontrol": "printf 'nid000001\\nnid000002\\n'",
        "srun": f'echo "srun $*" >>{log}; while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "singularity": f'echo "singularity [$#] $*" >>{log}; [[ $3 != "${{FAIL:-}}" ]]',
    }
    for name, body in programs.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_ / name).chmod(0o755)
    environment = {
        "PATH": f"{bin_}:/usr/bin:/bin",
        "USER": f"test-{os.getpid()}",
        "SIF": "/images/porta moe.sif",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "nid[000001-000002]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "8",
        "SLURM_CPUS_PER_TASK": "7",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "3",
        "SLURMD_NODENAME": "nid000001",
        "TMPDIR": str(tmp_path),
    }
    return log, environment


def submit(name: str, tmp_path: Path, environment: dict[str, str], *arguments: str) -> int:
    """Run the script as Slurm would, its cache folder below tmp_path."""
    script = tmp_path / "job.sbatch"
    script.write_text(text(name).replace("CACHE_ROOT=/tmp/", f"CACHE_ROOT={tmp_path}/"))
    command = ["/bin/bash", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


@each
def test_without_a_command_probe_and_verify_are_all(name: str, tmp_path: Path, cluster) -> None:
    log, environment = cluster
    assert submit(name, tmp_path, environment) == 0
    lines = log.read_text().splitlines()
    assert "--output=probe-%j-%N.json" in lines[0]
    bundle = "verify-1234567-nid000001.zip"
    assert [line for line in lines if line.startswith("singularity ")] == [
        f"singularity [7] run {environment['SIF']} probe capabilities --json --require triton_unfused",
        f"singularity [8] run {environment['SIF']} verify --quick --backend triton_unfused --bundle {bundle}",
    ]
    assert (tmp_path / f"{environment['USER']}-portamoe-1234567/triton").is_dir()


@each
@pytest.mark.parametrize("command", ["probe", "verify"])
def test_failed_probe_or_verify_stops_the_job(name: str, command: str, tmp_path: Path, cluster) -> None:
    log, environment = cluster
    assert submit(name, tmp_path, {**environment, "FAIL": command}, "python", "train.py") != 0
    assert "train.py" not in log.read_text()


@each
def test_another_backend_can_be_required(name: str, tmp_path: Path, cluster) -> None:
    log, environment = cluster
    assert submit(name, tmp_path, {**environment, "REQUIRE": "aiter"}) == 0
    assert "--require aiter\n" in log.read_text()
    assert "verify --quick --backend aiter " in log.read_text()


@each
def test_image_path_is_required(name: str, tmp_path: Path, cluster) -> None:
    log, environment = cluster
    del environment["SIF"]
    assert submit(name, tmp_path, environment) != 0
    assert not log.exists()


def test_one_node_starts_the_command_through_the_entrypoint(tmp_path: Path, cluster) -> None:
    log, environment = cluster
    assert submit("one-node", tmp_path, environment, "python", "a script.py") == 0
    lines = log.read_text().splitlines()
    assert any("--cpu-bind=mask_cpu:0x00fe000000000000," in line for line in lines)
    assert lines[-1] == f"singularity [4] run {environment['SIF']} python a script.py"


def test_several_nodes_meet_at_the_first(tmp_path: Path, cluster) -> None:
    log, environment = cluster
    assert submit("n-nodes", tmp_path, environment, "script.py", "--steps", "3") == 0
    last = log.read_text().splitlines()[-1]
    assert "--nnodes=2 --nproc-per-node=8" in last
    assert "--rdzv-endpoint=nid000001:14567 " in last
    assert last.endswith("script.py --steps 3")
