"""The plug-in's decisions on made-up vLLM configs: as data, with a reason for each refusal; vLLM is not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from portamoe.activations import SiTU, SwiGLU
from portamoe.decision import Reason
from portamoe.integrations import vllm as plugin
from portamoe.integrations.vllm.decision import LayerDecision, activation_of, decide, max_tokens, plain_torch

ROOT = Path(__file__).resolve().parents[2]


def moe(**changes):
    parallel = {
        "dp_size": 1, "use_all2all_kernels": False, "use_ag_rs_all2all_kernels": False, "enable_eplb": False,
        "all2all_backend": "allgather_reducescatter",
    }  # fmt: skip
    parallel |= changes.pop("parallel", {})
    values = {
        "num_experts": 16, "num_local_experts": 16, "experts_per_token": 4, "hidden_dim": 128, "device": "cpu",
        "intermediate_size_per_partition": 64, "activation": SimpleNamespace(value="situ"), "in_dtype": torch.bfloat16,
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "swiglu_limit": None, "swiglu_alpha": None,
        "swiglu_beta": None, "moe_backend": "auto", "has_bias": False, "is_lora_enabled": False, "max_num_tokens": 32,
        "moe_parallel_config": SimpleNamespace(**parallel),
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


@pytest.fixture(autouse=True)
def torch_backend(monkeypatch):
    monkeypatch.setenv("PORTAMOE_BACKEND", "torch")


def test_accepted_with_the_spec_of_this_rank():
    found = decide(moe(num_local_experts=4, max_num_tokens=10, parallel={"dp_size": 2}))
    assert found.backend.name == "torch"
    assert found.reasons == ()
    assert (found.spec.num_experts, found.spec.num_local_experts, found.spec.top_k) == (16, 4, 4)
    assert str(found).startswith("portamoe serves MXFP4 experts: torch on cpu (cpu): asked for by PORTAMOE_BACKEND")
    assert max_tokens(moe(max_num_tokens=10, parallel={"dp_size": 2})) == 20


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"moe_backend": "emulation"}, "--moe-backend"),
        ({"in_dtype": torch.float16}, "dtype"),
        ({"has_bias": True}, "bias"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"parallel": {"enable_eplb": True}}, "EPLB"),
        ({"parallel": {"use_all2all_kernels": True, "all2all_backend": "nixl_ep"}}, "--all2all-backend"),
        ({"parallel": {"use_passthrough_all2all": True}}, "--all2all-backend"),
        ({"aiter_fmoe_shared_expert_enabled": True}, "AITER's fused shared experts"),
        ({"activation": SimpleNamespace(value="swigluoai")}, "layer"),
        ({"hidden_dim": 100}, "layer"),
        ({"max_capture_size": 8}, "graphs of up to 8 tokens"),
    ],
)
def test_refused_with_a_reason(changes, what):
    found = decide(moe(**changes))
    assert found.backend is None
    assert [reason.what for reason in found.reasons] == [what]
    assert all(reason.remedy for reason in found.reasons)
    assert str(found).startswith("portamoe leaves MXFP4 experts to vLLM: ")


def test_all_reasons_are_given_at_once(monkeypatch):
    monkeypatch.setenv("PORTAMOE_VLLM", "0")
    found = decide(moe(has_bias=True, moe_backend="marlin"))
    assert [reason.what for reason in found.reasons] == ["PORTAMOE_VLLM", "--moe-backend", "bias"]


def test_a_gathering_all_to_all_is_accepted():
    parallel = {"use_all2all_kernels": True, "use_ag_rs_all2all_kernels": True}
    assert decide(moe(parallel=parallel)).backend is not None


def test_an_unknown_backend_is_a_reason(monkeypatch):
    monkeypatch.setenv("PORTAMOE_BACKEND", "nonsense")
    found = decide(moe())
    assert found.backend is None
    assert "unknown backend 'nonsense'" in str(found)


def test_activations():
    assert activation_of(moe()) == SiTU(beta=4.0, linear_beta=25.0)
    for unset in (None, 0.0, -1.0):
        assert activation_of(moe(activation_situ_linear_beta=unset)) == SiTU(beta=4.0)
    silu = SimpleNamespace(value="silu")
    assert activation_of(moe(activation=silu)) == SwiGLU()
    assert activation_of(moe(activation=silu, swiglu_limit=7.0)) == SwiGLU(limit=7.0)
    with pytest.raises(ValueError, match=r"alpha 1\.702"):
        activation_of(moe(activation=silu, swiglu_alpha=1.702))
    with pytest.raises(ValueError, match="activation gelu, expected situ or silu"):
        activation_of(moe(activation=SimpleNamespace(value="gelu")))


def test_plain_torch_undoes_and_restores():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), plain_torch():
            made = torch.ones(1)
            assert (made.dtype, made.device.type) == (torch.float32, "cpu")
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_decision_says_why():
    refused = LayerDecision(None, None, (Reason("EPLB", "enabled", "off", "turn it off"),))
    assert str(refused) == "portamoe leaves MXFP4 experts to vLLM: EPLB: enabled (needs off); turn it off"


def test_the_entry_point_is_the_one_that_is_announced():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nportamoe = "portamoe.integrations.vllm:register"' in text
    assert callable(plugin.register)


def test_importing_the_plug_in_loads_neither_vllm_nor_torch():
    script = "import sys, portamoe.integrations.vllm; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "common", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_switch_keeps_vllm_unasked(monkeypatch):
    monkeypatch.setenv("PORTAMOE_VLLM", "0")
    monkeypatch.setitem(sys.modules, "portamoe.integrations.vllm.config", None)
    plugin.register()  # would warn


def test_a_switch_that_means_nothing_is_an_error(monkeypatch):
    monkeypatch.setenv("PORTAMOE_VLLM", "off")
    with pytest.raises(ValueError, match="PORTAMOE_VLLM=off means nothing; 0 leaves portamoe out"):
        plugin.register()
