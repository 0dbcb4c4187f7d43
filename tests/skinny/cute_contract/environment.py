"""Make an environment with CuteDSL beside the test environment, and compile the CuteDSL kernels in it; needs no GPU.

    python -m tests.skinny.cute_contract.environment            # runs under the test environment's Python

PORTAMOE_CUTE_VENV names another place. See tests/contract_environment.py.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.contract_environment import ROOT, create, install

FOLDER = Path(os.environ.get("PORTAMOE_CUTE_VENV") or Path(sys.prefix) / "cute")
VERSION = "4.8.1"
#: The distribution itself would also pull the libraries for CUDA 12; these are all that compiling takes.
NEEDED = (
    f"nvidia-cutlass-dsl=={VERSION}",
    f"nvidia-cutlass-dsl-libs-base=={VERSION}",
    f"nvidia-cutlass-dsl-libs-core=={VERSION}",
    f"nvidia-cutlass-dsl-libs-cu13=={VERSION}",
    "cuda-bindings>=12.8",
    "cuda-pathfinder",
    "protobuf",
    "typing-extensions",
)


def main() -> int:
    """Install what is missing and run the tests; their exit status."""
    started = time.monotonic()
    python = create(FOLDER)
    install(python, *NEEDED)
    sys.stderr.write(f"cute: CuteDSL {VERSION} installed after {time.monotonic() - started:.0f} s\n")
    tests = [python, "-m", "pytest", "-q", "tests/skinny/cute_contract"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
