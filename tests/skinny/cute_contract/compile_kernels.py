"""Compile the CuteDSL kernels for one arch and say what the code holds, one line of JSON a kernel.

    PYTHON tests/skinny/cute_contract/compile_kernels.py sm_107a

A process of its own for each arch: a compiler may hang or crash, and this one can be given a time limit.
"""

import json
import os
import re
import sys
import tempfile
import time

#: K and M are Kimi-K3's projections: 7168 into the latent, 3584 out of it, 1536 out of attention, 768 out of a shard of
#: the shared experts; each line covers a branch of the kernels that the others do not.
CASES = (
    {"variant": "cute_gemv", "k": 7168, "m": 1, "threads": 224, "outputs": 2},
    {"variant": "cute_gemv", "k": 3584, "m": 4, "threads": 64, "outputs": 2, "residual": True, "pdl": True},
    {"variant": "cute_mma", "k": 7168, "m": 1, "rows": 48, "split": 4, "warps": 7, "pdl": True},
    {"variant": "cute_mma", "k": 3584, "m": 16, "split": 2, "rows": 32, "warps": 7, "residual": True, "pdl": True},
    {"variant": "cute_mma", "k": 1536, "m": 8, "rows": 8, "warps": 6, "stages": 3, "n": 1004},  # 8 does not divide N
    {"variant": "cute_mma", "k": 768, "m": 8, "rows": 64, "warps": 3, "chunk": 256, "stages": 1},
)


def facts(case: dict, arch: str) -> dict:
    """Compile one case and look at its PTX and machine code."""
    from cuda_moe import sass
    from cuda_moe.skinny import cute_launch

    started = time.monotonic()
    function = cute_launch.build(arch=arch, **case)
    ptx, cubin = function.__ptx__, function.__cubin__
    used = sass.resources(cubin)
    target = re.search(r"\.target\s+(\w+)", ptx)
    wait = ptx.find("griddepcontrol.wait")
    weights = [ptx.find(text) for text in ("ld.global.nc.L1::no_allocate", "cp.async.cg")]
    return {
        "target": target[1] if target else None,
        "elf": cubin[:4] == b"\x7fELF",
        "registers": used.registers,
        "spilled": used.stack + used.local,
        "stream": ptx.count("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32"),
        "cp_async": ptx.count("cp.async.cg.shared.global"),
        "far": ptx.count("st.shared::cluster.f32"),
        "mma": ptx.count("mma.sync.aligned.m16n8k16"),
        "fma": ptx.count("fma.rn.f32"),
        "wait": ptx.count("griddepcontrol.wait"),
        "launch_dependents": ptx.count("griddepcontrol.launch_dependents"),
        "weights_before_wait": 0 <= min(at for at in weights if at >= 0) < wait,
        "x_after_wait": ptx.find("ld.global.cg.v4.b32") > wait and "ld.global.v4" not in ptx,
        "entries": ptx.count(".entry"),
        "seconds": round(time.monotonic() - started, 1),
    }


def main(arch: str) -> None:
    """Print the facts of every case."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": folder}
        os.environ.pop("CUTE_DSL_ARCH", None)
        os.chdir(folder)
        for case in CASES:
            sys.stdout.write(json.dumps({"case": case, "facts": facts(case, arch)}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
