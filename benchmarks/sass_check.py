"""Compile the kernels of triton_fused for every NVIDIA target without a GPU; a spill or a wgmma hazard fails.

    python benchmarks/sass_check.py [--also 3.6.0 ...] [options of cuda_moe.compile_check]

--also VERSION  compiles with that Triton too, installed without dependencies under build/triton-VERSION
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "common")]

from benchmarks.isa_report import install_triton  # noqa: E402 - the checkout is not installed


def check(triton: Path | None, options: list[str]) -> int:
    """Run the checks with one Triton; return the status."""
    paths = [str(triton)] if triton else []
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join([*paths, str(ROOT / "common"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "cuda_moe.compile_check", *options]
        return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    """Check with the installed Triton and with those asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--also", nargs="*", default=[], metavar="VERSION", help="compile with these Tritons too")
    args, options = parser.parse_known_args()
    status = 0
    for version in [None, *args.also]:
        sys.stdout.write(f"Triton {version or 'as installed'}\n")
        sys.stdout.flush()
        status |= check(install_triton(version) if version else None, options)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
