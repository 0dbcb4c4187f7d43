"""How the real vLLM finds portamoe, what it asks and what it is told."""

import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm.plugins
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config, Mxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

from portamoe.integrations import vllm as plugin
from portamoe.integrations.vllm import config, decision
from portamoe.integrations.vllm.config import PortaMxfp4Config
from portamoe.integrations.vllm.experts import PortaExperts
from portamoe.integrations.vllm.method import PortaMxfp4MoEMethod
from portamoe.spec import KIMI_K3
from tests.host_recordings import recorded
from tests.vllm.contract.layers import moe_config

ROOT = Path(__file__).resolve().parents[3]
STANDARD = mk.FusedMoEActivationFormat.Standard


@pytest.fixture
def lumi(monkeypatch):
    """Let portamoe see the GPUs of a LUMI-G node, with a torch and a Triton that fit."""
    host = recorded("lumi-g", torch={"version": "2.13.0", "hip": "7.2", "cuda": None}, vendor={"triton": "3.9.0"})
    monkeypatch.setattr(decision, "detect", lambda: host)
    monkeypatch.setattr(decision, "torch_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(decision, "choose_verified", skip_canary(decision.choose_verified))
    return host


def skip_canary(choose):
    def chosen(*args, **kwargs):
        return choose(*args, **{**kwargs, "canary": "skip"})

    return chosen


def k3(**changes):
    changes = {"ep": 8, "rank": 3, "max_num_tokens": 8192} | changes
    return moe_config(KIMI_K3, **changes)


def supported(moe):
    return PortaExperts.is_supported_config(PortaExperts, moe, kMxfp4Static, None, STANDARD)


# --- registration -----------------------------------------------------------------------------------------------------


def test_the_installed_entry_point_registers_and_the_lookup_returns_ours():
    assert get_quantization_config("mxfp4") is PortaMxfp4Config
    assert issubclass(PortaMxfp4Config, Mxfp4Config)
    assert PortaMxfp4Config.get_name() == "mxfp4"


def test_loading_again_changes_nothing():
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    plugin.register()
    assert get_quantization_config("mxfp4") is PortaMxfp4Config


def test_other_names_are_not_touched():
    for name in ("gpt_oss_mxfp4", "compressed-tensors", "quark"):
        assert "portamoe" not in get_quantization_config(name).__module__


def test_turned_off_leaves_the_lookup_alone():
    script = (
        "import sys; sys.path[:0] = ['tests/vllm/contract']; import conftest\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.model_executor.layers.quantization import get_quantization_config\n"
        "print('class', get_quantization_config('mxfp4').__module__)\n"
        "print('loaded', sorted(m for m in sys.modules if m.startswith('portamoe.integrations.vllm.')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PORTAMOE_VLLM": "0"}, capture_output=True,
        text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "class vllm.model_executor.layers.quantization.mxfp4" in done.stdout
    assert "loaded []" in done.stdout


def test_a_vllm_without_the_classes_keeps_its_own_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "portamoe.integrations.vllm.config", None)
    monkeypatch.delattr(plugin, "config", raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger=plugin.LOGGER):
        plugin.register()
    assert "does not know this vLLM" in caplog.text


# --- the classes ------------------------------------------------------------------------------------------------------


def test_every_abstract_method_is_there_with_vllms_parameters():
    assert not PortaExperts.__abstractmethods__
    names = mk.FusedMoEExpertsModular.__abstractmethods__ | {"is_supported_config"}
    assert len(names) >= 10
    for name in names:
        theirs, ours = (inspect.signature(getattr(c, name)) for c in (mk.FusedMoEExpertsModular, PortaExperts))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_overridden_members_exist_in_vllm():
    for ours, theirs in ((PortaMxfp4MoEMethod, Mxfp4MoEMethod), (PortaMxfp4Config, Mxfp4Config)):
        for name, member in vars(ours).items():
            if name.startswith("__") or name in {"supports_pre_processed_weights"}:
                continue
            assert hasattr(theirs, name), name
            if callable(member):
                expected = list(inspect.signature(getattr(theirs, name)).parameters)
                assert list(inspect.signature(member).parameters) == expected, name


def test_the_name_holds_nothing_that_vllms_loader_looks_for():
    assert not any(word in PortaMxfp4MoEMethod.__name__ for word in ("ModelOpt", "compressed", "Compressed"))


def test_attributes_are_those_of_the_stock_method(torch_backend):
    """The parent's __init__ is not called: what it sets must be set by ours."""
    source = inspect.getsource(Mxfp4MoEMethod.__init__)
    ours = config.PortaMxfp4Config()._make_moe_method(moe_config())
    for line in source.splitlines():
        words = line.strip().removeprefix("self.").split(":")[0].split(" =")[0].split(",")[0]
        if line.strip().startswith("self.") and words.isidentifier():
            assert hasattr(ours, words), words


# --- decisions --------------------------------------------------------------------------------------------------------


def test_where_stock_raises_on_gfx90a_ours_serves(torch_backend):
    moe = moe_config()
    with pytest.raises(NotImplementedError, match="No MXFP4 MoE backend"):
        Mxfp4MoEMethod(moe)
    method = get_quantization_config("mxfp4").from_config({})._make_moe_method(moe)
    assert isinstance(method, PortaMxfp4MoEMethod)


def test_kimi_k3_on_gfx90a(lumi):
    assert supported(k3()) == (True, None)
    found = config.decide(k3())
    assert found.backend.name == "triton_unfused"
    assert (found.spec.hidden_size, found.spec.intermediate_size, found.spec.num_local_experts) == (3584, 3072, 112)
    assert str(found).startswith("portamoe serves MXFP4 experts: triton_unfused on cuda:0 (gfx90a)")
    by_tensor = config.decide(k3(ep=1, tp=8))
    assert by_tensor.spec.intermediate_size == 384
    assert by_tensor.backend.name == "triton_unfused"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"moe_backend": "triton_unfused"}, "--moe-backend: triton_unfused"),
        ({"has_bias": True}, "bias"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"in_dtype": torch.float16}, "dtype"),
        ({"activation": MoEActivation.SWIGLUOAI}, "activation"),
        ({"activation": MoEActivation.RELU2_NO_MUL}, "no act_and_mul|activation"),
        ({"activation_situ_beta": None}, "activation_situ_beta"),
        ({"parallel_changes": {"enable_eplb": True}}, "EPLB"),
        ({"parallel_changes": {"dp_size": 2, "all2all_backend": "deepep_high_throughput"}}, "all2all"),
        ({"parallel_changes": {"dp_size": 2, "all2all_backend": "deepep_low_latency"}}, "all2all|parallel config"),
        ({"hidden_dim": 3600}, "no multiple of 32"),
        ({"max_capture_size": 512}, None),
    ],
)
def test_what_is_refused_and_what_is_not(lumi, changes, why):
    moe = k3(**changes)
    found = config.decide(moe)
    ok, said = supported(moe)
    assert ok == (why is None)
    assert (found.backend is not None) == (why is None)
    if why is not None:
        assert any(word in f"{said} {found}" for word in why.split("|"))
        assert all(reason.what for reason in found.reasons)


def test_the_torch_backend_is_no_default_and_no_graph(monkeypatch):
    monkeypatch.delenv("PORTAMOE_BACKEND", raising=False)
    found = config.decide(moe_config())
    assert found.backend is None
    assert "torch, for tests and rare devices" in str(found)
    monkeypatch.setenv("PORTAMOE_BACKEND", "torch")
    assert config.decide(moe_config()).backend.name == "torch"
    assert "--enforce-eager" in str(config.decide(moe_config(max_capture_size=512)))


def test_vllms_own_native_path_is_left_alone(monkeypatch):
    host = recorded("b300", torch={"version": "2.13.0", "hip": None, "cuda": "13.0"}, vendor={"triton": "3.9.0"})
    monkeypatch.setattr(decision, "detect", lambda: host)
    monkeypatch.setattr(decision, "torch_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(decision, "choose_verified", skip_canary(decision.choose_verified))
    assert "before sm_100" in str(config.decide(k3()))
    monkeypatch.setenv("PORTAMOE_VLLM", "1")
    assert config.decide(k3()).backend.name == "triton_fused"


def test_settings_that_ask_for_vllms_aiter_are_obeyed(monkeypatch, lumi):
    from vllm.model_executor.layers.quantization import mxfp4

    monkeypatch.setattr(mxfp4, "_use_k3_situ_aiter", lambda _: True, raising=False)
    found = config.decide(k3())
    assert found.backend is None
    assert "VLLM_ROCM_USE_AITER" in str(found)


def test_the_decision_is_logged_once(lumi, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm"):
        for rank in (3, 4, 5):
            PortaMxfp4Config()._make_moe_method(k3(rank=rank, num_logical_experts=895))
    said = [r for r in caplog.records if "portamoe serves" in r.message]
    assert len(said) == 1


def test_a_decision_does_not_depend_on_what_vllm_sets_while_it_builds(torch_backend):
    expected = str(config.decide(moe_config()))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert str(config.decide(moe_config())) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_documented_fallback_lifts_the_list(monkeypatch):
    """docs/vllm.md, "Without portamoe": the stock oracle no longer refuses SiTU in the unfused Triton experts."""
    from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import UnfusedOAITritonExperts

    block = re.search(r"```python\n(# allow_situ.*?)```", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(block, names)  # noqa: S102 - a file of this repository
    monkeypatch.setattr(
        UnfusedOAITritonExperts, "_supports_activation", staticmethod(UnfusedOAITritonExperts._supports_activation)
    )
    moe = moe_config(moe_backend="triton_unfused")
    with pytest.raises(ValueError, match=r"does not support MoEActivation\.SITU"):
        Mxfp4MoEMethod(moe)
    names["register"]()
    assert UnfusedOAITritonExperts._supports_activation(MoEActivation.SITU)
    assert UnfusedOAITritonExperts._supports_activation(MoEActivation.SILU)
    assert not UnfusedOAITritonExperts._supports_activation(MoEActivation.RELU2_NO_MUL)
    assert Mxfp4MoEMethod(moe).experts_cls is UnfusedOAITritonExperts
    assert config.decide(moe).backend is None
