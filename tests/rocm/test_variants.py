"""The list of binaries: complete, small and named."""

from __future__ import annotations

import dataclasses

import pytest

from portamoe.activations import Activation, SiTU, SwiGLU
from portamoe.spec import GPT_OSS, KIMI_K3
from rocm_moe import plan
from rocm_moe.tiles import load_table

pytest.importorskip("triton")

SPECS = (
    dataclasses.replace(KIMI_K3, local_experts=range(112)),
    dataclasses.replace(KIMI_K3, intermediate_size=384),
    dataclasses.replace(KIMI_K3, intermediate_size=96, activation=SwiGLU(limit=7.0)),
    GPT_OSS,
)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90", "sm_120"])
def test_every_launch_is_in_the_list_and_the_list_is_short(arch):
    from rocm_moe.variants import kernel_variants

    for spec in SPECS:
        variants = {v.name: v for v in kernel_variants(arch, spec)}
        assert len(variants) == len(kernel_variants(arch, spec)), "names are unique"
        assert len(variants) <= 24
        table = load_table(arch)
        for tokens in (*range(1, 130), 255, 256, 257, 1000, 2048, 4096, 8191, 8192):
            for rows, ids in ((10**7, "i32"), (4096, "i64")):
                assert {launch.variant for launch in plan.launches(spec, table, tokens, rows, ids)} <= set(variants)
        for v in variants.values():
            assert list(v.signature) == list(v.fn.arg_names)
            assert {n for n, t in v.signature.items() if t == "constexpr"} == set(v.constexprs)


def test_an_unknown_activation_is_refused():
    from rocm_moe.variants import activation_constants

    @dataclasses.dataclass(frozen=True)
    class Other(Activation):
        name = "other"

        def _formula(self, gate, up):
            return gate

    with pytest.raises(TypeError, match="no kernel for the activation"):
        activation_constants(Other())
    assert activation_constants(SiTU(4.0, 25.0)) == ("situ", 4.0, 25.0, 0.0)
