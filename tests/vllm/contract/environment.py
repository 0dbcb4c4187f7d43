"""Make an environment with a real vLLM that imports on a CPU, and run the contract tests in it.

    python -m tests.vllm.contract.environment 0.33.0 0.32.0       # runs under the test environment's Python

vLLM and the packages of requirements.txt are 700 MB. Environments of other versions than NEWEST are deleted after their
tests. See tests/contract_environment.py.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.contract_environment import ROOT, create, install

HERE = Path(__file__).resolve().parent
NEWEST = "0.33.0"
BASE = Path(os.environ.get("PORTAMOE_VLLM_VENV") or Path(sys.prefix) / "vllm")


def main(versions: list[str]) -> int:
    """Install and test each version in turn; the first failure is the exit status."""
    for version in versions or [NEWEST]:
        folder = BASE if version == NEWEST else BASE.with_name(f"{BASE.name}-{version}")
        started = time.monotonic()
        python = make(folder, version)
        say(f"vllm {version} installed after {time.monotonic() - started:.0f} s")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PORTAMOE_VLLM_CONTRACT": "1"}
        for name in ("TRITON_INTERPRET", "VLLM_PLUGINS", "PORTAMOE_VLLM", "PORTAMOE_BACKEND"):
            environment.pop(name, None)
        tests = [python, "-m", "pytest", "-q", HERE]
        status = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
        say(f"vllm {version} tested after {time.monotonic() - started:.0f} s: {'failed' if status else 'passed'}")
        if folder != BASE:
            shutil.rmtree(folder)
        if status:
            return status
    return 0


def make(folder: Path, version: str) -> Path:
    """Create the environment, install what is not there yet, and return its Python."""
    python = create(folder)
    install(python, f"vllm=={version}")
    install(python, "-r", HERE / "requirements.txt")
    # For the entry point; its build backend is the calling environment's.
    install(python, "--no-build-isolation", "--editable", ROOT)
    return python


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
