"""Compile FlashInfer's two CuteDSL GEMMs for SM100, SM103 and SM107 at Kimi-K3's sizes, without a GPU.

    PYTHON tests/flashinfer/contract/compile_kernels.py         # the Python of `make test-flashinfer`'s environment

Each kernel is compiled in a child process with a time limit. Its PTX must name the arch and use tcgen05. GEMM1 with
SiTU must differ from GEMM1 with SwiGLU by SiTU's constants; GEMM2 must add with atomics only where it finalizes, and
must refuse the other way where support.json says so. `make test-flashinfer-kernels`; minutes, not part of CI.
"""

import argparse
import inspect
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "common"), str(ROOT)]

from cuda_moe.flashinfer.support import support  # noqa: E402

#: Additions to global memory: `red` and `atom`, and the bulk copies that add.
ATOMICS = re.compile(r"^\s*(?:@\S+\s+)?(?:red|atom|cp\.reduce)\S*\.add", re.M)
ARCHS = ("sm_100a", "sm_103a", "sm_107a")
LIMIT_SECONDS = 240
#: Kimi-K3: T·K rows padded to tiles, 2I, H, local experts of one of 16 ranks, K.
SIZES = {"orig_m": 16, "permuted_m": 4096, "n": 6144, "k": 3584, "num_experts": 56, "topk": 16}
SITU = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
#: What the betas look like in code: SM100 and SM103 take tanh(g / beta), SM107 2·sigmoid(2g / beta) - 1.
CONSTANTS = {"beta": (4.0, 0.25, 8.0, -4.0), "linear_beta": (25.0, 0.04, 50.0, -25.0, 0.08)}


def compile_one(arch: str, kernel: str, *, variant: bool) -> None:
    """Compile in this process; print one line of JSON.

    kernel, variant:  "gemm1" with SiTU or SwiGLU, "gemm2" with the atomic finalize or without
    """
    import cutlass
    from cutlass import cute
    from flashinfer.cute_dsl.utils import make_ptr

    def pointer(dtype, align=16):
        return make_ptr(dtype, 0x10000, cute.AddressSpace.gmem, assumed_align=align)

    shared = {
        "max_active_clusters": 148,
        "stream": cutlass.cuda.default_stream() if hasattr(cutlass, "cuda") else cute.runtime.make_fake_stream(),
        "a_per_token_scale_ptr": None,
        "sf_vec_size": 16,
        "tile_size": 128,
        "cluster_shape_mn": (1, 1),
        "raster_along_m": False,
        "enable_pdl": True,
    }
    if arch == "sm_107a":
        shared |= {"mma_tiler": (128, 128, 256), "mma_inst_shape": (128, 128, 128)}
    else:
        shared |= {"mma_tiler_mn": (128, 128)}
    compiled, values = (_gemm1 if kernel == "gemm1" else _gemm2)(cutlass, pointer, variant=variant)
    values |= shared
    known = inspect.signature(compiled).parameters
    started = time.monotonic()
    try:
        compiled(**{name: value for name, value in values.items() if name in known})
    except NotImplementedError as error:
        sys.stdout.write(json.dumps({"refused": str(error)}) + "\n")
        return
    sys.stdout.write(json.dumps({"seconds": round(time.monotonic() - started, 1)}) + "\n")


def _gemm1(cutlass, pointer, *, variant: bool):
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_gather_grouped_gemm_act_fusion as gemm

    fp4, e4m3, i32, f32 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Int32, cutlass.Float32
    return gemm._get_compiled_gather_kernel, {
        **SIZES,
        **{name: pointer(fp4, 32) for name in ("a_ptr", "b_ptr", "c_ptr")},
        **{name: pointer(e4m3) for name in ("a_sf_ptr", "b_sf_ptr", "c_sf_ptr")},
        **{name: pointer(i32) for name in ("tile_idx_ptr", "mn_limit_ptr", "token_id_ptr", "num_tiles_ptr")},
        **{name: pointer(f32) for name in ("alpha_ptr", "norm_const_ptr")},
        "clamped_relu2_limit_ptr": None,
        "a_dtype": "float4_e2m1fn",
        "b_dtype": "float4_e2m1fn",
        "sf_dtype": "float8_e4m3fn",
        "c_dtype": "float4_e2m1fn",
        "quantize_output": True,
        "vectorized_f32": True,
        **(SITU if variant else {}),
    }


def _gemm2(cutlass, pointer, *, variant: bool):
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_grouped_gemm_finalize_fusion as gemm

    fp4, e4m3, i32, f32 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Int32, cutlass.Float32
    return gemm._get_compiled_finalize_kernel, {
        "seq_len": SIZES["orig_m"],
        "permuted_m": SIZES["permuted_m"],
        "n": SIZES["k"],
        "k": SIZES["n"] // 2,
        "num_experts": SIZES["num_experts"],
        "topk": SIZES["topk"],
        **{name: pointer(fp4, 32) for name in ("a_ptr", "b_ptr")},
        **{name: pointer(e4m3) for name in ("a_sf_ptr", "b_sf_ptr")},
        **{name: pointer(i32) for name in ("tile_idx_ptr", "mn_limit_ptr", "permuted_idx_ptr", "num_tiles_ptr")},
        **{name: pointer(f32) for name in ("alpha_ptr", "token_scales_ptr")},
        "c_ptr": pointer(cutlass.BFloat16),
        "a_dtype": fp4,
        "b_dtype": fp4,
        "sf_dtype": e4m3,
        "out_dtype": cutlass.BFloat16,
        "final_scale_dtype": f32,
        "use_fused_finalize": variant,
    }


def ptx_of(arch: str, kernel: str, *, variant: bool) -> tuple[str, float]:
    """Return the PTX and the seconds it took, from a child process; "" where FlashInfer refuses to compile."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": arch,
            "CUTE_DSL_KEEP_PTX": "1",
            "CUTE_DSL_DUMP_DIR": folder,
            "FLASHINFER_LOGGING_LEVEL": "ERROR",
        }
        command = [sys.executable, __file__, arch, "--one", kernel, *(["--variant"] if variant else [])]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, cwd=folder
        )
        if done.returncode:
            raise RuntimeError(f"{arch} {kernel}: {done.stderr[-1500:]}")
        said = json.loads(done.stdout.strip().splitlines()[-1])
        if "refused" in said:
            return "", 0.0
        files = sorted(Path(folder).rglob("*.ptx"))
        if not files:
            raise RuntimeError(f"{arch} {kernel}: no PTX was written")
        return "\n".join(path.read_text() for path in files), said["seconds"]


def holds(ptx: str, value: float) -> bool:
    """Does the PTX contain a float32 constant, alone or twice in 64 bits?"""
    bits = struct.unpack(">I", struct.pack(">f", value))[0]
    pair = bits << 32 | bits
    signed = pair - (1 << 64) if pair >> 63 else pair
    return any(re.search(rf"\b{text}\b", ptx, re.IGNORECASE) for text in (f"0f{bits:08X}", f"0x{pair:016X}", signed))


def gemm1(arch: str) -> tuple[bool, dict]:
    """Return whether GEMM1 with SiTU is what it should be, and the facts."""
    with_situ, seconds = ptx_of(arch, "gemm1", variant=True)
    without, _ = ptx_of(arch, "gemm1", variant=False)
    found = {
        name: [v for v in values if holds(with_situ, v) and not holds(without, v)] for name, values in CONSTANTS.items()
    }
    facts = _facts(with_situ, seconds) | found | {"differs from SwiGLU": with_situ != without}
    good = facts["target"] == arch and facts["tcgen05"] and found["beta"] and found["linear_beta"]
    return bool(good), facts


def gemm2(arch: str) -> tuple[bool, dict]:
    """Return whether both forms of GEMM2 are what support.json says, and the facts of the deterministic one."""
    version = Version(metadata.version("flashinfer-python"))
    plain, seconds = ptx_of(arch, "gemm2", variant=False)
    atomic, _ = ptx_of(arch, "gemm2", variant=True)
    added = len(ATOMICS.findall(atomic))
    if support().is_atomic_only(arch.removesuffix("a"), version):
        return not plain and added > 0, {"atomic only": True, "atomics": added}
    facts = _facts(plain, seconds) | {"atomics": len(ATOMICS.findall(plain)), "atomics of the fused finalize": added}
    return bool(facts["target"] == arch and facts["tcgen05"] and not facts["atomics"] and added), facts


def _facts(ptx: str, seconds: float) -> dict:
    target = re.search(r"\.target\s+(\w+)", ptx)
    return {"target": target[1] if target else None, "tcgen05": ptx.count("tcgen05.mma"), "seconds": seconds}


def main() -> int:
    """Compile both kernels for every arch; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", default=ARCHS, help="default: all")
    parser.add_argument("--kernel", choices=("gemm1", "gemm2"), help="default: both")
    parser.add_argument("--one", choices=("gemm1", "gemm2"), help=argparse.SUPPRESS)
    parser.add_argument("--variant", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        compile_one(options.archs[0], options.one, variant=options.variant)
        return 0
    failed = 0
    for arch in options.archs:
        for name, look in (("gemm1", gemm1), ("gemm2", gemm2)):
            if options.kernel in (None, name):
                good, facts = look(arch)
                failed += not good
                sys.stdout.write(f"{'compiled' if good else 'FAILED'} {arch} {name}: {json.dumps(facts)}\n")
                sys.stdout.flush()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
