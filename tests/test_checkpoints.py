"""Checkpoints that are good: what is read from them, and what is not touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from portamoe.activations import Activation, SiTU, SwiGLU, SwiGLUOAI
from portamoe.checkpoints import CheckpointExperts, load_experts
from portamoe.spec import MoESpec
from portamoe.weights import Expert, ExpertSource, validate
from tests import checkpoint_builders as build
from tests.checkpoint_builders import DATA, E, assert_same

SETS = [("kimi-k3-tiny", 1), ("kimi-k3-tiny", 2), ("gpt-oss-tiny", 0), ("kimi-k3-nvfp4-tiny", 1)]
Decoded = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def decode(expert: Expert) -> Decoded:
    """w13, w2 and their biases in float64, by this suite's own decoder."""
    w13, w2 = expert.w13.numpy(), expert.w2.numpy()
    assert expert.w13_scale is not None
    assert expert.w2_scale is not None
    s13, s2 = (scale.view(torch.uint8).numpy() for scale in (expert.w13_scale, expert.w2_scale))
    if expert.w13_global_scale is None:
        values = build.decode_mxfp4(w13, s13), build.decode_mxfp4(w2, s2)
    else:
        assert expert.w2_global_scale is not None
        halves = zip(np.split(w13, 2), np.split(s13, 2), expert.w13_global_scale.tolist(), strict=True)
        values = (
            np.concatenate([build.decode_nvfp4(*half) for half in halves]),
            build.decode_nvfp4(w2, s2, float(expert.w2_global_scale)),
        )
    biases = (np.zeros(1) if b is None else b.double().numpy() for b in (expert.w13_bias, expert.w2_bias))
    return *values, *biases  # type: ignore[return-value]


def decode_raw(raw: dict[str, np.ndarray], prefix: str, e: int) -> Decoded:
    """The same from a file's arrays, straight from the format's description."""
    if f"{prefix}gate_up_proj_blocks" in raw:

        def stacked(name: str) -> tuple[np.ndarray, np.ndarray]:
            blocks, scales = raw[f"{prefix}{name}_blocks"][e], raw[f"{prefix}{name}_scales"][e]
            return build.decode_mxfp4(blocks.reshape(len(blocks), -1), scales), build.decode_bf16(
                raw[f"{prefix}{name}_bias"][e]
            )

        (gate_up, bias), (w2, w2_bias) = stacked("gate_up_proj"), stacked("down_proj")
        order = [*range(0, len(bias), 2), *range(1, len(bias), 2)]
        return gate_up[order], w2, bias[order], w2_bias

    def projection(p: str) -> np.ndarray:
        base = f"{prefix}{e}.{p}"
        if f"{base}.weight_scale_2" in raw:
            return build.decode_nvfp4(
                raw[f"{base}.weight"], raw[f"{base}.weight_scale"], raw[f"{base}.weight_scale_2"].item()
            )
        return build.decode_mxfp4(raw[f"{base}.weight_packed"], raw[f"{base}.weight_scale"])

    return np.concatenate([projection("w1"), projection("w3")]), projection("w2"), np.zeros(1), np.zeros(1)


@pytest.mark.parametrize(("name", "layer"), SETS)
def test_decoded_weights_are_those_of_the_file(name: str, layer: int) -> None:
    spec, source = load_experts(DATA / name, layer)
    raw = build.read_raw_folder(DATA / name)
    (prefix,) = {n[: n.index(".experts.") + 9] for n in raw if f"layers.{layer}." in n and ".experts." in n}
    assert isinstance(source, ExpertSource)
    assert len(source) == spec.num_experts
    validate(source, spec)
    for e in range(len(source)):
        for ours, theirs in zip(decode(source.expert(e)), decode_raw(raw, prefix, e), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_specs_follow_the_configs() -> None:
    situ, oai = SiTU(beta=4.0, linear_beta=25.0), SwiGLUOAI(alpha=1.702, limit=7.0)
    kimi = MoESpec(hidden_size=256, intermediate_size=192, num_experts=16, top_k=4, activation=situ)
    nvfp4 = replace(kimi, num_experts=4, top_k=2, weight_format="nvfp4", local_experts=range(4))
    gpt = MoESpec(hidden_size=160, intermediate_size=160, num_experts=8, top_k=2, activation=oai, bias=True)
    for (name, layer), expected in zip(SETS, (kimi, kimi, gpt, nvfp4), strict=True):
        spec, source = load_experts(DATA / name, layer)
        assert spec == source.spec == expected
    assert source.description == "Kimi-K3-NVFP4, Model Optimizer"


def moe(source: ExpertSource, activation: Activation, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    x, y = tensors["x"].double().numpy(), np.zeros(tensors["y_ref"].shape)
    for t, (ids, weights) in enumerate(
        zip(tensors["topk_ids"].tolist(), tensors["topk_weights"].tolist(), strict=True)
    ):
        for e, weight in zip(ids, weights, strict=True):
            w13, w2, b13, b2 = decode(source.expert(e))
            gate, up = torch.from_numpy(w13 @ x[t] + b13).chunk(2)
            y[t] += weight * (w2 @ activation(gate, up).numpy() + b2)
    return y


def relative_rms(y: np.ndarray, reference: torch.Tensor) -> float:
    ref = reference.double().numpy()
    return float(np.sqrt(np.mean((y - ref) ** 2) / np.mean(ref**2)))


@pytest.mark.parametrize(("name", "layer"), SETS)
def test_layer_values_are_the_expected_ones(name: str, layer: int) -> None:
    spec, source = load_experts(DATA / name, layer)
    tensors = load_file(DATA / name / "expected" / f"layer_{layer}.safetensors")
    y = moe(source, spec.activation, tensors)
    assert relative_rms(y, tensors["y_ref"]) < 1e-12
    wrong = {key: relative_rms(y, value) for key, value in tensors.items() if key.startswith("y_if_")}
    assert wrong
    assert min(wrong.values()) > 0.1, wrong
    assert relative_rms(moe(source, SwiGLU(), tensors), tensors["y_ref"]) > 0.1


def test_a_folder_with_only_the_experts_in_one_file(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    _, sharded = load_experts(checkpoint.write(tmp_path / "a"), 1)
    checkpoint.tensors = {n: t for n, t in checkpoint.tensors.items() if n.startswith(build.KIMI_PREFIX)}
    directory = checkpoint.write(tmp_path / "b", sharded=False)
    (directory / "model.safetensors").rename(directory / "experts.safetensors")
    _, single = load_experts(str(directory), 1)
    assert_same(single.expert(3), sharded.expert(3))


def test_text_model_alone_with_a_flat_config(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    spec, source = load_experts(checkpoint.write(tmp_path / "a"), 1)
    checkpoint.rename("language_model.model.", "model.")
    checkpoint.config = checkpoint.config["text_config"]
    flat_spec, flat = load_experts(checkpoint.write(tmp_path / "b"), 1)
    assert flat_spec == spec
    assert_same(flat.expert(0), source.expert(0))


def test_quantization_config_may_stand_at_the_top(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.config["quantization_config"] = checkpoint.text.pop("quantization_config")
    spec, _ = load_experts(checkpoint.write(tmp_path), 1)
    assert spec.weight_format == "mxfp4"


@pytest.mark.parametrize("builder", [build.kimi_k3, build.kimi_k3_quark, build.gpt_oss])
def test_float8_e8m0fnu_scales_keep_their_bytes(builder: Callable[[], build.Checkpoint], tmp_path: Path) -> None:
    checkpoint = builder()
    for name, value in checkpoint.tensors.items():
        if name.endswith(("weight_scale", "_scales")):
            # 1 and 254 turn into 0 or saturate when cast by value.
            value.view(-1)[:6] = torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8)
    _, plain = load_experts(checkpoint.write(tmp_path / "a"), checkpoint.layer)
    for name, value in checkpoint.tensors.items():
        if name.endswith(("weight_scale", "_scales")):
            checkpoint.tensors[name] = value.view(torch.float8_e8m0fnu)
    _, typed = load_experts(checkpoint.write(tmp_path / "b"), checkpoint.layer)
    for e in range(E):
        assert_same(typed.expert(e), plain.expert(e))
    assert_same(typed.materialize().expert(0), plain.expert(0))


def test_gpt_oss_with_an_odd_size(tmp_path: Path) -> None:
    # 2880 = 90 blocks of 32: no multiple of 64 or 128.
    checkpoint = build.gpt_oss(hidden=2880, inter=32)
    directory = checkpoint.write(tmp_path, sharded=False)
    spec, source = load_experts(directory, 0, range(3, 4))
    validate(source, spec)
    raw = build.read_raw(directory / "model.safetensors")
    for ours, theirs in zip(decode(source.expert(0)), decode_raw(raw, build.GPT_OSS_PREFIX, 3), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_quark_holds_the_bytes_of_the_release(tmp_path: Path) -> None:
    _, release = load_experts(build.kimi_k3().write(tmp_path / "a"), 1)
    spec, quark = load_experts(build.kimi_k3_quark().write(tmp_path / "b"), 1)
    assert spec.weight_format == "mxfp4"
    for e in range(E):
        assert_same(quark.expert(e), release.expert(e))


def test_nvfp4_scales_are_per_projection(tmp_path: Path) -> None:
    _, source = load_experts(build.kimi_k3_nvfp4().write(tmp_path), 1, range(1, 4))
    for index, e in enumerate(range(1, 4)):
        expert = source.expert(index)
        assert expert.w13_global_scale is not None
        assert expert.w13_input_scale is not None
        assert expert.w13_global_scale.tolist() == [3 * e + 0.5, 3 * e + 2.5]  # w1, w3
        assert expert.w13_input_scale.tolist() == [3 * e + 1.0, 3 * e + 3.0]
        assert (float(expert.w2_global_scale or 0), float(expert.w2_input_scale or 0)) == (3 * e + 1.5, 3 * e + 2.0)


def test_packed_nvfp4_stores_reciprocal_scales(tmp_path: Path) -> None:
    _, modelopt = load_experts(build.kimi_k3_nvfp4().write(tmp_path / "a"), 1)
    spec, packed = load_experts(build.kimi_k3_nvfp4_packed().write(tmp_path / "b"), 1)
    assert spec.weight_format == "nvfp4"
    for e in range(E):
        ours, theirs = packed.expert(e), modelopt.expert(e)
        assert torch.equal(ours.w13, theirs.w13)
        for name in ("w13_global_scale", "w2_global_scale", "w13_input_scale", "w2_input_scale"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=3e-7, atol=0)


def test_packed_nvfp4_for_weights_only_has_no_input_scales(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3_nvfp4_packed()
    checkpoint.quantization["config_groups"]["group_0"]["input_activations"] = None
    checkpoint.tensors = {n: t for n, t in checkpoint.tensors.items() if not n.endswith("input_global_scale")}
    _, source = load_experts(checkpoint.write(tmp_path), 1)
    assert source.expert(0).w13_input_scale is None


def test_layers_missing_from_quantized_layers_are_read_as_what_they_are(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3_nvfp4()
    _, named = load_experts(checkpoint.write(tmp_path / "a"), 1)
    checkpoint.quantization["quantized_layers"] = {}
    spec, unnamed = load_experts(checkpoint.write(tmp_path / "b"), 1)
    assert spec.weight_format == "nvfp4"
    assert_same(unnamed.expert(2), named.expert(2))


def test_an_unbounded_up_is_null_in_the_config(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.text["activation_situ_linear_beta"] = None
    spec, _ = load_experts(checkpoint.write(tmp_path), 1)
    assert spec.activation == SiTU(beta=4.0, linear_beta=None)


def test_files_beside_the_index_are_none_of_our_business(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    save_file({f"{build.KIMI_PREFIX}0.w1.weight_packed": torch.zeros(2)}, directory / "consolidated.safetensors")
    load_experts(directory, 1)


def test_896_experts(tmp_path: Path) -> None:
    h = i = 32
    config = build.kimi_k3().config
    config["text_config"] |= {
        "num_experts": 896,
        "num_experts_per_token": 16,
        "routed_expert_hidden_size": h,
        "moe_intermediate_size": i,
    }
    tensors = {}
    for e in range(896):
        for number, p in enumerate(("w1", "w2", "w3")):
            base = f"{build.KIMI_PREFIX}{e}.{p}"
            tensors[f"{base}.weight_packed"] = torch.full((32, 16), (e + 85 * number) % 256, dtype=torch.uint8)
            tensors[f"{base}.weight_scale"] = torch.full((32, 1), e // 8, dtype=torch.uint8)
    spec, source = load_experts(build.Checkpoint(config, tensors, 1).write(tmp_path), 1, range(700, 896))
    assert isinstance(source, CheckpointExperts)
    assert (len(source), spec.num_experts, spec.top_k) == (196, 896, 16)
    last = source.expert(195)
    assert last.w13_scale is not None
    assert (last.w13[0, 0].item(), last.w13[-1, 0].item()) == (895 % 256, (895 + 170) % 256)
    assert last.w13_scale[0, 0].item() == 111
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["num_experts"] == 896
