"""Installations of `flashinfer` on disk, as small as detection and a strict call need them.

They take the signatures of the version from contract.json and compute through strict_kernels.py, which is copied into
them, so that they also work in a child process.
"""

import json
import shutil
from pathlib import Path

from packaging.version import Version

HERE = Path(__file__).parent
CONTRACT = json.loads((HERE / "contract.json").read_text(encoding="utf-8"))
VERSIONS = ("0.6.18", "0.7.0", "0.7.1", "0.7.2", "0.7.2.post1", "0.7.4")
#: As artifacts.py of 0.7.2.post1 names it.
ARTIFACT = "8ee504560a86b6c72b8c941d3003e8fb1804b1b6/batched_gemm-fdba669-16ba8ed/"

_KERNELS = {
    "cute_dsl_fused_moe": "cute_dsl(call, VERSION, DROP_SITU, ARCH)",
    "cute_dsl_fused_moe_nvfp4": "cute_dsl(call, VERSION, DROP_SITU, ARCH)",
    "trtllm_fp4_block_scale_routed_moe": "trtllm(call, VERSION, DROP_SITU)",
    "cutlass_fused_moe": "cutlass(call, VERSION, DROP_SITU)",
    "interleave_moe_weights_for_sm90_mixed_gemm": "interleave_sm90(call)",
}
_QUANTISERS = {"fp4_quantize": "fp4_quantize(call)", "mxfp8_quantize": "mxfp8_quantize(call)"}

_FUNCTION = """
def {name}{signature}:
    call = dict(locals())
    CALLS.append(({name!r}, call))
    return _strict.{body}
"""

_ARTIFACTS = """
class ArtifactPath:
    TRTLLM_GEN_FMHA: str = "other/"
    TRTLLM_GEN_BMM: str = (
        {path!r}
    )
"""


def signature(name: str, version: str) -> str | None:
    """Return the recorded signature that holds at `version`; None where it has no such function."""
    records = [r["signature"] for r in CONTRACT[name] if Version(r["since"]) <= Version(version)]
    return records[-1] if records else None


def activation_types(version: str) -> dict[str, int]:
    """Return ActivationType's members at `version`."""
    enums = CONTRACT["enums"]
    later = enums["ActivationType since 0.7.4"] if Version(version) >= Version("0.7.4") else {}
    return enums["ActivationType"] | later


def tree(
    site: Path, version: str, *, drop_situ: bool = False, without: tuple[str, ...] = (), arch: str = "sm_100"
) -> Path:
    """Write FlashInfer of `version` into `site`; return the package folder.

    drop_situ:  compute SwiGLU where SiTU is asked for, without an error
    without:    functions to leave out, as the package does when Triton or CuteDSL is missing
    arch:       the device that it believes to run on
    """
    root = site / "flashinfer"
    (root / "fused_moe").mkdir(parents=True)
    shutil.copy(HERE / "strict_kernels.py", root / "_strict.py")
    constants = {"CALLS": [], "VERSION": version, "DROP_SITU": drop_situ, "ARCH": arch}
    head = "from flashinfer import _strict\n" + "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    moe = head + "from flashinfer.tllm_enums import ActivationType\n" + _functions(_KERNELS, version, without)
    (root / "fused_moe" / "__init__.py").write_text(moe)
    (root / "__init__.py").write_text(head + _functions(_QUANTISERS, version, without))
    members = "\n".join(f"    {name} = {value}" for name, value in activation_types(version).items())
    layouts = "\n".join(f"    {name} = {value}" for name, value in CONTRACT["enums"]["SfLayout"].items())
    classes = f"class ActivationType(IntEnum):\n{members}\n\nclass SfLayout(IntEnum):\n{layouts}\n"
    (root / "tllm_enums.py").write_text(f"from enum import IntEnum\n\n{classes}")
    (root / "artifacts.py").write_text(_ARTIFACTS.format(path=ARTIFACT))
    info = site / f"flashinfer_python-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n")
    return root


def _functions(bodies: dict[str, str], version: str, without: tuple[str, ...]) -> str:
    out = []
    for name, body in bodies.items():
        text = signature(name, version)
        if text is not None and name not in without:
            out.append(_FUNCTION.format(name=name, signature=text, body=body))
    return "\n".join(out)
