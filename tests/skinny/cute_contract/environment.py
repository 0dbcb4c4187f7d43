"""Make an environment with CuteDSL beside the test environment, and compile the CuteDSL kernels in it; needs no GPU.

    python tests/skinny/cute_contract/environment.py            # runs under the test environment's Python

The environment lies in that of the calling Python and sees its torch, Triton and pytest through a path file, so that
only CuteDSL and two small packages are fetched. PORTAMOE_CUTE_VENV names another place.
"""

import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ.get("PORTAMOE_CUTE_VENV") or Path(sys.prefix) / "cute")
PYTHON = FOLDER / "bin" / "python"
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
    create()
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", *NEEDED]
    subprocess.run(command, check=True, stdout=sys.stderr)
    sys.stderr.write(f"cute: CuteDSL {VERSION} installed after {time.monotonic() - started:.0f} s\n")
    tests = [PYTHON, "-m", "pytest", "-q", "tests/skinny/cute_contract"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


def create() -> None:
    """Create the environment and let it see the calling Python's packages."""
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True, clear=True)
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER), "platbase": str(FOLDER)}))
    seen = [p for p in sys.path if p and Path(p).name in {"site-packages", "dist-packages"}]
    (purelib / "inherited.pth").write_text("".join(f"{folder}\n" for folder in seen))


if __name__ == "__main__":
    sys.exit(main())
