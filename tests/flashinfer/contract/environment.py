"""Make an environment with a real FlashInfer that imports on a CPU, and run the contract tests in it.

    python -m tests.flashinfer.contract.environment 0.7.2.post1 newest       # runs under the test environment's Python

It serves all versions in turn. `newest` is what the package index offers. See tests/contract_environment.py.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.contract_environment import ROOT, create, install

FOLDER = Path(os.environ.get("PORTAMOE_FLASHINFER_VENV") or Path(sys.prefix) / "flashinfer")
#: What FlashInfer's import needs beside torch, Triton and numpy; the contract was recorded with CuteDSL 4.8.1.
NEEDED = (
    "apache-tvm-ffi>=0.1.11,<0.2",
    "click",
    "einops",
    "filelock",
    "ninja",
    "requests",
    "charset-normalizer",
    "idna",
    "urllib3",
    "certifi",
    "tabulate",
    "protobuf",
    "cuda-bindings>=12.8",
    "cuda-pathfinder",
    "nvidia-cutlass-dsl==4.8.1",
    "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1",
)


def main(versions: list[str]) -> int:
    """Install each version in turn and run the tests against it; the first failure is the exit status."""
    python = create(FOLDER)
    install(python, *NEEDED)
    for version in versions:
        started = time.monotonic()
        wanted = "flashinfer-python" if version == "newest" else f"flashinfer-python=={version}"
        install(python, "--upgrade", wanted)
        say(f"{wanted} installed after {time.monotonic() - started:.0f} s")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLASHINFER_LOGGING_LEVEL": "ERROR"}
        tests = [python, "-m", "pytest", "-q", "tests/flashinfer/contract"]
        status = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
        if status:
            return status
    return 0


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(f"flashinfer: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
