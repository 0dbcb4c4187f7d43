"""Compile FlashInfer's CuteDSL GEMM1 with SiTU for SM100, SM103 and SM107 at Kimi-K3's sizes, without a GPU.

    PYTHON tests/flashinfer/contract/compile_kernels.py         # the Python of `make test-flashinfer`'s environment

Each arch and activation is compiled in a child process with a time limit. The PTX must name the arch, use tcgen05, and
differ between SiTU and SwiGLU by SiTU's constants. `make test-flashinfer-kernels`; minutes, not part of CI.
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
from pathlib import Path

ARCHS = ("sm_100a", "sm_103a", "sm_107a")
LIMIT_SECONDS = 240
#: Kimi-K3: T·K rows padded to tiles, 2I, H, local experts of one of 16 ranks, K.
SIZES = {"orig_m": 16, "permuted_m": 4096, "n": 6144, "k": 3584, "num_experts": 56, "topk": 16}
SITU = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
#: What the betas look like in code: SM100 and SM103 take tanh(g / beta), SM107 2·sigmoid(2g / beta) - 1.
CONSTANTS = {"beta": (4.0, 0.25, 8.0, -4.0), "linear_beta": (25.0, 0.04, 50.0, -25.0, 0.08)}


def compile_one(arch: str, situ: bool) -> None:
    """Compile in this process; print one line of JSON."""
    import cutlass
    from cutlass import cute
    from flashinfer.cute_dsl.utils import make_ptr
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_gather_grouped_gemm_act_fusion as gemm

    def pointer(dtype, align=16):
        return make_ptr(dtype, 0x10000, cute.AddressSpace.gmem, assumed_align=align)

    fp4, e4m3, i32, f32 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Int32, cutlass.Float32
    values = {
        **SIZES,
        **{name: pointer(fp4, 32) for name in ("a_ptr", "b_ptr", "c_ptr")},
        **{name: pointer(e4m3) for name in ("a_sf_ptr", "b_sf_ptr", "c_sf_ptr")},
        **{name: pointer(i32) for name in ("tile_idx_ptr", "mn_limit_ptr", "token_id_ptr", "num_tiles_ptr")},
        **{name: pointer(f32) for name in ("alpha_ptr", "norm_const_ptr")},
        "a_per_token_scale_ptr": None,
        "clamped_relu2_limit_ptr": None,
        "max_active_clusters": 148,
        "stream": cutlass.cuda.default_stream() if hasattr(cutlass, "cuda") else cute.runtime.make_fake_stream(),
        "a_dtype": "float4_e2m1fn",
        "b_dtype": "float4_e2m1fn",
        "sf_dtype": "float8_e4m3fn",
        "c_dtype": "float4_e2m1fn",
        "quantize_output": True,
        "sf_vec_size": 16,
        "tile_size": 128,
        "cluster_shape_mn": (1, 1),
        "vectorized_f32": True,
        "raster_along_m": False,
        "enable_pdl": True,
        **(SITU if situ else {}),
    }
    if arch == "sm_107a":
        values |= {"mma_tiler": (128, 128, 256), "mma_inst_shape": (128, 128, 128)}
    else:
        values |= {"mma_tiler_mn": (128, 128)}
    known = inspect.signature(gemm._get_compiled_gather_kernel).parameters
    started = time.monotonic()
    gemm._get_compiled_gather_kernel(**{name: value for name, value in values.items() if name in known})
    sys.stdout.write(json.dumps({"seconds": round(time.monotonic() - started, 1)}) + "\n")


def ptx_of(arch: str, *, situ: bool) -> tuple[str, float]:
    """Return the PTX and the seconds it took, from a child process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": arch,
            "CUTE_DSL_KEEP_PTX": "1",
            "CUTE_DSL_DUMP_DIR": folder,
            "FLASHINFER_LOGGING_LEVEL": "ERROR",
        }
        command = [sys.executable, __file__, "--one", arch, *(["--situ"] if situ else [])]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, cwd=folder
        )
        if done.returncode:
            raise RuntimeError(f"{arch}: {done.stderr[-1500:]}")
        files = sorted(Path(folder).rglob("*.ptx"))
        if not files:
            raise RuntimeError(f"{arch}: no PTX was written")
        seconds = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
        return "\n".join(path.read_text() for path in files), seconds


def holds(ptx: str, value: float) -> bool:
    """Does the PTX contain a float32 constant, alone or twice in 64 bits?"""
    bits = struct.unpack(">I", struct.pack(">f", value))[0]
    pair = bits << 32 | bits
    signed = pair - (1 << 64) if pair >> 63 else pair
    return any(re.search(rf"\b{text}\b", ptx, re.IGNORECASE) for text in (f"0f{bits:08X}", f"0x{pair:016X}", signed))


def main() -> int:
    """Compile every arch with SiTU and without, and compare; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", default=ARCHS, help="default: all")
    parser.add_argument("--one", choices=ARCHS, help=argparse.SUPPRESS)
    parser.add_argument("--situ", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        compile_one(options.one, options.situ)
        return 0
    failed = 0
    for arch in options.archs:
        with_situ, seconds = ptx_of(arch, situ=True)
        without, _ = ptx_of(arch, situ=False)
        target = re.search(r"\.target\s+(\w+)", with_situ)
        facts = {
            "target": target[1] if target else None,
            "tcgen05": with_situ.count("tcgen05.mma"),
            **{
                name: [v for v in values if holds(with_situ, v) and not holds(without, v)]
                for name, values in CONSTANTS.items()
            },
            "differs from SwiGLU": with_situ != without,
            "seconds": seconds,
        }
        good = facts["target"] == arch and facts["tcgen05"] and facts["beta"] and facts["linear_beta"]
        failed += not good
        sys.stdout.write(f"{'compiled' if good else 'FAILED'} {arch}: {json.dumps(facts)}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
