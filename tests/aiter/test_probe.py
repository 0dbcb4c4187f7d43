"""The decision on recorded hosts with AITER trees of several versions: accepted, or a reason that can be acted on."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from portamoe import registry
from portamoe.activations import SiTU, SwiGLU, SwiGLUOAI
from portamoe.checkpoints import load_experts
from portamoe.decision import Accepted, Rejected
from portamoe.detection import detect
from portamoe.spec import GPT_OSS, KIMI_K3
from portamoe.testing import assert_close
from rocm_moe.aiter.backend import BACKEND, prepared_bytes
from rocm_moe.aiter.call import KEYWORDS, POSITIONAL
from rocm_moe.aiter.detect import detect_aiter
from tests.aiter import trees

HOSTS = Path("tests/data/hosts")
MI355X = HOSTS / "mi355x-aiter-0.1.20"


@pytest.fixture
def host(tmp_path):
    """Return a function that replays a recorded host with changes to host.json and gives its first device."""

    def replay(name="mi355x-aiter-0.1.20", *, found="recorded", env=None, distributions=None, **changes):
        folder = tmp_path / "host"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(HOSTS / name, folder)
        path = folder / "host.json"
        facts = json.loads(path.read_text())
        if found != "recorded":
            facts["vendor"]["aiter"] = found
        facts["env"] = env or {}
        facts["distributions"].update(distributions or {})
        facts.update(changes)
        path.write_text(json.dumps(facts))
        return detect(folder).devices[0]

    return replay


@pytest.fixture
def tree(tmp_path):
    """Return a function that writes a tree and gives its static facts."""

    def facts(write, **kwargs):
        site = tmp_path / "site"
        shutil.rmtree(site, ignore_errors=True)
        write(site)
        kwargs.setdefault("config_dir", tmp_path / "aiter_configs")
        return detect_aiter([str(site)], env={"HOME": str(tmp_path)}, **kwargs)

    return facts


def reasons(device, spec=KIMI_K3, *, alternative=True):
    """Return the reasons against aiter as one text; each must say what to do, one of them what to use instead."""
    decision = next(d for d in registry.decide(spec, device) if d.backend == "aiter")
    if isinstance(decision, Accepted):
        return ""
    assert all(reason.remedy for reason in decision.reasons), decision.reasons
    assert not alternative or any("triton_unfused" in reason.remedy for reason in decision.reasons)
    return " | ".join(map(str, decision.reasons))


def test_the_recorded_mi355x_selects_aiter():
    device = detect(MI355X).devices[0]
    selection = registry.choose(KIMI_K3, device)
    assert selection.name == "aiter"
    assert device.arch == "gfx950"


@pytest.mark.parametrize("version", ["0.1.20", "0.1.20.post1", trees.MAIN, "0.1.22+rocm7.2", "0.1.24.post1"])
def test_releases_from_the_floor_are_selected(host, tree, version):
    facts = tree(lambda site: trees.amd_tree(site, version))
    assert registry.choose(KIMI_K3, host(found=facts)).name == "aiter"


def test_probe_selects_and_the_tiny_checkpoint_comes_out(host, install):
    """The whole way on a recorded MI355X with a tree of 0.1.20: decision, preparation, call, expected values."""
    site = install("0.1.20")
    device = host(found=detect_aiter([str(site)], config_dir=site / "configs"))
    assert registry.choose(KIMI_K3, device).name == "aiter"
    spec, weights = load_experts("tests/data/kimi-k3-tiny", 1)
    backend = registry.select(spec, device)
    assert backend is BACKEND
    expected = load_file("tests/data/kimi-k3-tiny/expected/layer_1.safetensors")
    prepared = backend.prepare(weights, spec, torch.device("cpu"))
    out = torch.empty_like(expected["x"])
    rows = backend.default_max_local_rows(spec, len(out))
    workspace = torch.empty(backend.workspace_bytes(spec, len(out), rows), dtype=torch.uint8)
    ids, weight = expected["topk_ids"], expected["topk_weights"]
    backend.forward(prepared, expected["x"], ids, weight, workspace, out, max_local_rows=rows)
    assert_close(out, expected["y_ref"], roundings=2)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda site: trees.amd_tree(site, "0.1.18"), "aiter: 0.1.18 (needs >= 0.1.20"),
        (lambda site: trees.amd_tree(site, "0.1.19"), "aiter: 0.1.19 (needs >= 0.1.20"),
        (lambda site: trees.amd_tree(site, "0.1.19.post2"), "interleaved"),
        (trees.pypi_amd_tree, "aiter: 0.1.7.post2.dev18 (needs >= 0.1.20"),
        (trees.impostor_tree, "pip uninstall aiter"),
        (lambda site: (trees.amd_tree(site, "0.1.20") / "fused_moe.py").write_text(""), "broken: fused_moe.py"),
        (lambda site: (site / "aiter").mkdir(parents=True), "without __init__.py"),
    ],
)
def test_other_installations_are_rejected(host, tree, write, says):
    device = host(found=tree(write))
    assert says in reasons(device)
    assert registry.choose(KIMI_K3, device).name not in {None, "aiter"}


def _development(site, version, situv2=None):
    root = trees.amd_tree(site, "0.1.20", wheel=False, distribution=False)
    (root / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    if situv2:
        source = (root / "fused_moe.py").read_text()
        (root / "fused_moe.py").write_text(source.replace("float=4.0", f"float={situv2}"))


@pytest.mark.parametrize(
    ("version", "situv2", "says"),
    [
        ("0.1.0", None, "fetch AITER's tags"),
        ("0.1.dev1+g6dc26b7a", None, "fetch AITER's tags"),
        ("0.1.20.dev5+g0123abc", None, "aiter: 0.1.20.dev5+g0123abc (needs >= 0.1.20"),
        ("0.1.20rc1", None, "aiter: 0.1.20rc1 (needs >= 0.1.20"),
        ("0.1.21", 2.0, "situv2 defaults (2.0, 25.0)"),
    ],
)
def test_source_trees_whose_layout_is_uncertain(host, tree, version, situv2, says):
    """The order of gate and up changed in 0.1.20, and a wrong guess gives garbage without an error."""
    facts = tree(lambda site: _development(site, version, situv2))
    assert says in reasons(host(found=facts))


def test_missing_and_incomplete(host, tree):
    assert "aiter: not installed (needs >= 0.1.20)" in reasons(host(found=None))
    facts = tree(lambda site: trees.amd_tree(site, "0.1.20"))
    less = {**facts, "parameters": [p for p in facts["parameters"] if p != "gate_mode"]}
    assert "lacks gate_mode" in reasons(host(found=less))
    assert "no ActivationType.Situv2" in reasons(host(found={**facts, "has_situv2": False}))
    device = host(found={**facts, "flydsl": None})
    without = dataclasses.replace(device.host, distributions={})
    assert "flydsl: not installed" in reasons(dataclasses.replace(device, host=without))


def test_the_recorded_impostor():
    device = detect(HOSTS / "mi355x-aiter-impostor").devices[0]
    text = reasons(device)
    assert "another package of that name" in text
    assert "pip uninstall aiter" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [("lumi-g", "gfx90a is unsupported in AITER"), ("mi300x", "gfx942 is unsupported in AITER")],
)
def test_other_archs_even_with_a_good_installation(host, tree, name, says):
    facts = tree(lambda site: trees.amd_tree(site, "0.1.20"))
    assert says in reasons(host(name, found=facts))


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        ("gfx1250", "unverified"),
        ("gfx90a", "aborts the process"),
        ("gfx942", "v_cvt_scalef32_pk_bf16_fp4"),
        ("gfx1100", "arch: gfx1100 (needs gfx950)"),
        ("gfx906", "arch: gfx906 (needs gfx950)"),
    ],
)
@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "mxfp4"])
def test_archs_by_mode(host, arch, says, fmt):
    device = dataclasses.replace(host(), arch=arch)
    text = reasons(device, dataclasses.replace(KIMI_K3, activation_format=fmt))
    assert says in text or (arch == "gfx942" and fmt != "bf16" and "quantising activations" in text)


def test_other_vendors_get_one_reason():
    for name in ("h200", "cpu-only"):
        device = detect(HOSTS / name).devices[0]
        assert len(BACKEND.check(KIMI_K3, device)) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"activation": SiTU(4.0)}, "linear_beta: None"),
        ({"activation": SwiGLU()}, "activation: swiglu (needs situ)"),
        ({"activation": SwiGLUOAI(1.702, 7.0)}, "known bad on gfx950"),
        ({"bias": True}, "biases"),
        ({"weight_format": "nvfp4"}, "weight format: nvfp4"),
        ({"activation_format": "nvfp4"}, "activation format: nvfp4 (needs bf16, mxfp8, mxfp4)"),
    ],
)
def test_specs_that_it_does_not_serve(host, change, says):
    text = reasons(host(), dataclasses.replace(KIMI_K3, **change))
    assert says in text
    assert "triton_unfused" in text


def test_gpt_oss(host):
    text = reasons(host(), GPT_OSS)
    assert "biases" in text
    assert "swiglu_oai is known bad" in text


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "mxfp4"])
@pytest.mark.parametrize(
    "variable",
    ["AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4", "AITER_MXFP4_INTERMEDIATE", "AITER_MOE_A8W4_BYPASS_QUANT"],
)
def test_the_environment(host, fmt, variable):
    agrees = (fmt, variable) in {("mxfp8", "AITER_SITUV2_A8W4"), ("mxfp4", "AITER_SITUV2_A4W4")}
    spec = dataclasses.replace(KIMI_K3, activation_format=fmt)
    text = reasons(host(env={variable: "1"}), spec)
    assert text == "" if agrees else f"{variable}: 1" in text
    assert reasons(host(env={variable: "0"}), spec) == ""


def test_folders_locks_memory_and_torch(host, tree, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    facts = tree(lambda site: trees.amd_tree(site, "0.1.20"), config_dir=blocked)
    assert "the path is fixed in AITER" in reasons(host(found=facts))
    facts = tree(lambda site: trees.amd_tree(site, "0.1.20"))
    text = reasons(host(found={**facts, "jit_dir": "/opt/jit", "jit_dir_writable": False}))
    assert "/opt/jit cannot be written" in text
    assert "set AITER_JIT_DIR" in text
    assert "rm /jit/build/lock_a" in reasons(host(found={**facts, "locks": ["/jit/build/lock_a"]}))
    small = dataclasses.replace(host(), memory_free_bytes=10_000_000_000)
    assert "memory: 10.0 GB free" in reasons(small, alternative=False)
    old = host(torch={"version": "2.7.1+rocm6.4", "hip": "6.4"})
    assert "torch: 2.7.1+rocm6.4 (needs >= 2.8)" in reasons(old, alternative=False)
    other = host(torch={"version": "2.10.0", "hip": None, "cuda": "12.8"})
    assert "ROCm build" in reasons(other, alternative=False)


def test_spread_experts_only_on_request(host):
    device = host()
    spec = dataclasses.replace(KIMI_K3, local_experts=range(112, 224))
    decision = next(d for d in registry.decide(spec, device) if d.backend == "aiter")
    assert isinstance(decision, Accepted)
    assert "112 of 896" in str(decision.only_on_request)
    assert registry.choose(spec, device).name != "aiter"
    assert registry.choose(spec, device, "aiter").name == "aiter"


def test_a_forced_aiter_that_is_rejected_raises(host):
    decision = registry.choose(KIMI_K3, host(found=None), "aiter")
    assert decision.name is None
    assert "not installed" in decision.why
    rejected = next(d for d in decision.decisions if d.backend == "aiter")
    assert isinstance(rejected, Rejected)


def test_kimi_k3_takes_what_the_sizes_say():
    """16.7 GB for all experts of a layer: 896 * (3 * 3584 * 3072 / 2 + scales of 1/32)."""
    assert prepared_bytes(KIMI_K3) == 896 * (3 * 3584 * 3072 // 2 + 3 * 3584 * 3072 // 32)


def test_every_recorded_signature_since_the_floor_takes_the_call():
    for record in trees.CONTRACT["fused_moe"][-2:]:
        for name in (*POSITIONAL, *KEYWORDS):
            assert f"{name}=" in record["signature"] or f"{name}:" in record["signature"] or name in POSITIONAL
