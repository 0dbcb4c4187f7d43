"""What the adapters assume, compared with the FlashInfer that is installed; `make test-flashinfer` brings one.

Nothing here needs a GPU: signatures, enums, archs, pure-torch converters, and where FlashInfer's sources say what the
table says.
"""

import importlib.metadata
import importlib.util
import inspect
import math
from pathlib import Path

import pytest
import torch
from packaging.version import Version

if importlib.util.find_spec("flashinfer") is None:
    pytest.skip("FlashInfer is not installed; make test-flashinfer", allow_module_level=True)

from cuda_moe.flashinfer import call, layouts
from cuda_moe.flashinfer.cutedsl import BACKEND as CUTEDSL
from cuda_moe.flashinfer.cutlass import BACKEND as CUTLASS
from cuda_moe.flashinfer.detect import detect_flashinfer
from cuda_moe.flashinfer.support import support
from cuda_moe.flashinfer.trtllm import BACKEND as TRTLLM
from tests.flashinfer import strict_kernels, trees

VERSION = Version(importlib.metadata.version("flashinfer-python"))
ROOT = Path(importlib.util.find_spec("flashinfer").submodule_search_locations[0])


def bytes_(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("backend", [CUTEDSL, TRTLLM, CUTLASS], ids=lambda b: b.name)
def test_every_function_is_there_with_the_parameters_that_are_passed(backend):
    handle = call.load(backend.functions)
    assert set(handle.functions) == set(backend.functions)


def test_signatures_are_the_recorded_ones_of_this_version():
    """A newer release than those recorded may add parameters, never lose one or change a default."""
    import flashinfer
    import flashinfer.fused_moe

    known = max(Version(v) for v in trees.VERSIONS)
    for name in trees.CONTRACT:
        recorded = trees.signature(name, str(VERSION)) if isinstance(trees.CONTRACT[name], list) else None
        if recorded is None:
            continue
        namespace = {"unset": object()}
        exec(f"def recorded{recorded}: ...", namespace)  # noqa: S102 - a file of this repository
        wanted = inspect.signature(namespace["recorded"]).parameters
        module = flashinfer if hasattr(flashinfer, name) and not hasattr(flashinfer.fused_moe, name) else None
        real = inspect.signature(getattr(module or flashinfer.fused_moe, name)).parameters
        if known >= VERSION:
            assert list(real) == list(wanted), name
        for parameter, entry in wanted.items():
            assert parameter in real, f"{name} lost {parameter}"
            if isinstance(entry.default, bool | int | float):
                assert real[parameter].default == entry.default, f"{name}: {parameter}"


def test_the_neutral_clamp_is_the_largest_float32():
    from flashinfer.fused_moe import cute_dsl_fused_moe

    default = inspect.signature(cute_dsl_fused_moe).parameters["swiglu_limit"].default
    assert default == pytest.approx(torch.finfo(torch.float32).max)
    assert math.isclose(default, strict_kernels.NO_LIMIT, rel_tol=1e-6)


def test_enums():
    from flashinfer.fused_moe import ActivationType
    from flashinfer.tllm_enums import RoutingMethodType, SfLayout

    real = {member.name: int(member) for member in ActivationType}
    assert trees.activation_types(str(VERSION)).items() <= real.items()
    assert {m.name: int(m) for m in SfLayout} == trees.CONTRACT["enums"]["SfLayout"]
    assert int(RoutingMethodType.Renormalize) == 1


def test_archs():
    from flashinfer.fused_moe import api, cute_dsl_fused_moe

    for arch in (100, 103, 107):
        assert cute_dsl_fused_moe.is_compute_capability_supported(arch)
        assert api.TrtllmFp4Config.supported(arch)
        assert not api.CutlassW4A16Config.supported(arch)
    assert not cute_dsl_fused_moe.is_compute_capability_supported(90)
    assert api.CutlassW4A16Config.supported(90)


def test_situ_is_chosen_by_its_beta_under_the_base_type():
    from flashinfer.fused_moe.cute_dsl import moe_utils
    from flashinfer.tllm_enums import ActivationType

    with pytest.raises(ValueError, match="activation_type"):
        moe_utils.normalize_cute_dsl_moe_activation_type(ActivationType.Situ)
    validate = moe_utils.validate_cute_dsl_moe_situ_config
    validate(ActivationType.Swiglu, 4.0, 25.0)
    validate(ActivationType.Swiglu, 4.0, None)
    with pytest.raises(ValueError, match="requires situ_beta"):
        validate(ActivationType.Swiglu, None, 25.0)
    with pytest.raises(ValueError, match=r"ActivationType.Swiglu"):
        validate(ActivationType.GegluTanh, 4.0, None)


def test_the_rubin_kernel_takes_the_betas_from_the_version_on_that_the_table_says():
    folder = ROOT / "fused_moe" / "cute_dsl" / "rubin"
    has_situ = any("situ_beta" in path.read_text() for path in folder.glob("*gather*.py"))
    lines = support().about("cutedsl_w4a4", "sm_107", "situ")
    status = next(e.status for e in lines if e.covers(VERSION))
    assert (status == "works") is has_situ


def test_the_rubin_kernel_has_a_deterministic_finalize_from_the_version_on_that_the_table_says():
    source = (ROOT / "fused_moe/cute_dsl/blockscaled_contiguous_grouped_gemm_finalize_fusion.py").read_text()
    refused = "use_fused_finalize=False is not supported by the Rubin" in source
    assert support().is_atomic_only("sm_107", VERSION) is refused
    assert not support().is_atomic_only("sm_100", VERSION)


def test_flashinfers_runner_refuses_what_the_table_calls_wrong_or_absent():
    source = (ROOT / "fused_moe" / "runners.py").read_text()
    assert "does not support SiTU on SM107" in source
    assert "(QuantFormat.MXFP4, QuantFormat.BF16): (SwiGLU,)" in source


def test_w4a8_has_situ_where_the_table_says_so():
    from flashinfer.fused_moe import cute_dsl_fused_moe

    lines = support().about("cutedsl_w4a8", "sm_103", "situ")
    works = any(e.status == "works" and e.covers(VERSION) for e in lines)
    assert ("swap_ab" in inspect.signature(cute_dsl_fused_moe).parameters) is works


def test_the_mma_view_is_flashinfers():
    from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout

    scale = torch.stack([layouts.swizzle_scale(bytes_(256, 24, seed=i)) for i in range(3)])
    real = convert_sf_to_mma_layout(scale.reshape(-1, 24), m=256, k=24 * 16, num_groups=3, sf_vec_size=16)
    ours = layouts.mma_view(scale)
    assert torch.equal(ours, real)
    assert ours.stride() == real.stride()


@pytest.mark.parametrize("group", [64, 16])
def test_the_interleave_is_flashinfers(group):
    from flashinfer.fused_moe import prepare

    from portamoe.layouts import Layout

    weight = bytes_(2, 256, 32)
    up_gate = torch.cat((weight[:, 128:], weight[:, :128]), 1)
    real = prepare._interleave_linear_and_gate(up_gate, group_size=group, dim=1)
    assert torch.equal(weight[:, Layout("up", group).rows(128)], real)


def test_trtllms_row_order_is_flashinfers():
    from flashinfer.fused_moe import core

    from portamoe.layouts import Layout

    weight = bytes_(256, 64)
    up_gate = torch.cat((weight[128:], weight[:128]))
    real = up_gate[core._maybe_get_cached_w3_w1_permute_indices({}, up_gate, 128)]
    assert torch.equal(layouts.shuffle_rows(weight[Layout("up", 1).rows(128)]), real)
    scale = bytes_(256, 16, seed=1)
    real = core._maybe_get_cached_w3_w1_permute_indices({}, scale, 128, num_elts_per_sf=16)
    up_gate = torch.cat((scale[128:], scale[:128]))
    assert torch.equal(layouts.shuffle_rows(scale[Layout("up", 1).rows(128)]), up_gate[real])
    w2 = bytes_(128, 32, seed=2)
    assert torch.equal(layouts.shuffle_rows(w2), w2[core.get_w2_permute_indices_with_cache({}, w2, 128)])


def test_the_folded_scales_are_flashinfers():
    from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm

    scale = bytes_(2, 128, 16)
    real = interleave_moe_scales_for_sm90_mixed_gemm(scale)
    assert torch.equal(torch.stack([layouts.fold_scale(s) for s in scale]), real)


def test_static_facts_agree_with_the_package():
    from flashinfer.artifacts import ArtifactPath

    facts = detect_flashinfer()
    assert Version(facts["version"]) == VERSION
    assert facts["artifacts"]["folder"].endswith(ArtifactPath.TRTLLM_GEN_BMM.rstrip("/"))


def test_the_default_tactic_is_minus_one():
    source = (ROOT / "fused_moe" / "cute_dsl" / "tuner.py").read_text()
    assert "if tactic is None or tactic == -1:" in source
