"""Compile the block's kernels at Kimi-K3's sizes for a target without a GPU; prints one JSON line a kernel."""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from portamoe.models import _block_kernels as device_code

BF16, F32, I32 = "*bf16", "*fp32", "*i32"
KERNELS = {
    "router_logits_kernel": (
        {"x": BF16, "weight": BF16, "partial": F32, "tokens": "i32"},
        {"E": 896, "D": 7168, "BT": 16, "BE": 16, "BK": 256, "STEPS": 4, "WIDEN": False},
    ),
    "route_kernel": (
        {"partial": F32, "bias": F32, "ids": I32, "weights": F32, "tokens": "i32"},
        {"E": 896, "BINS": 1024, "TOPK": 16, "SLOTS": 16, "SPLITS": 7, "RENORMALIZE": True, "FACTOR": 1.0},
    ),
    "situ_kernel": (
        {"gate_up": BF16, "h": BF16, "S": "i32"},
        {"BETA": 4.0, "LINEAR_BETA": 25.0, "BLOCK": 1024},
    ),
    "norm_kernel": ({"x": BF16, "weight": BF16, "out": BF16}, {"EPS": 1e-5, "H": 3584, "BLOCK": 4096}),
}
#: Targets with programmatic dependent launch.
DEPENDENT = ("sm_90", "sm_103")
WARPS = {"norm_kernel": 8}


def target(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def main() -> None:
    for name, (types, sizes) in KERNELS.items():
        fn = getattr(device_code, name)
        constants = sizes | {"PDL": sys.argv[1] in DEPENDENT}
        signature = {arg: types.get(arg, "constexpr") for arg in fn.arg_names}
        attrs = {
            (i,): [["tt.divisibility", 16]] for i, a in enumerate(fn.arg_names) if types.get(a, "").startswith("*")
        }
        source = ASTSource(fn, signature, constants, attrs)
        options = {"num_warps": WARPS.get(name, 4)}
        if constants["PDL"] and name in ("route_kernel", "situ_kernel"):
            options["launch_pdl"] = True
        compiled = triton.compile(source, target=target(sys.argv[1]), options=options)
        spills = int(getattr(compiled.metadata, "n_spills", 0) or getattr(compiled, "n_spills", 0) or 0)
        print(json.dumps({"kernel": name, "shared": compiled.metadata.shared, "spills": spills}))  # noqa: T201


if __name__ == "__main__":
    main()
