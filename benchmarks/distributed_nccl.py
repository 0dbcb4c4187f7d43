"""Experts over the GPUs of this machine: results against one process, then dispatch, GEMMs and combine in µs and bytes.

    python benchmarks/distributed_nccl.py [--gpus 2] [--backend triton_unfused] [--json FILE]

Starts `portamoe.distributed.selftest` with NCCL (RCCL on AMD), one process a GPU, 1 to 8,192 tokens a rank, 16 experts
of Kimi-K3 a GPU. Times are the slowest rank's medians between two waits for the device, so the steps of a call do not
overlap and their sum is an upper bound. NVLink multicast is off: shared machines do not always allow it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--backend", default="triton_unfused", help="of the layers; exact sums need torch or this one")
    parser.add_argument("--max-tokens", type=int, default=8192, help="received in a round; more run in further rounds")
    parser.add_argument("--json", default="benchmarks/results/distributed-nccl.json")
    options = parser.parse_args()
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
    command += ["-m", "portamoe.distributed.selftest", "--backend", "nccl", "--layer-backend", options.backend]
    command += ["--max-tokens", str(options.max_tokens), "--json", options.json, "--tokens", *map(str, TOKENS)]
    return subprocess.run(command, env={"NCCL_NVLS_ENABLE": "0"} | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
