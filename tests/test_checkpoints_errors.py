"""Checkpoints that are bad: a CheckpointError that says what, before any data is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from portamoe.checkpoints import CheckpointError, load_experts
from tests import checkpoint_builders as build
from tests.checkpoint_builders import GPT_OSS_PREFIX, KIMI_PREFIX, Checkpoint

Builder = Callable[[], Checkpoint]
W1 = f"{KIMI_PREFIX}0.w1.weight_packed"
S2 = f"{KIMI_PREFIX}2.w2.weight_scale"
BLOCKS = f"{GPT_OSS_PREFIX}gate_up_proj_blocks"


def fail(checkpoint: Checkpoint, directory: Path, message: str, *, sharded: bool = True) -> CheckpointError:
    """Write and load; the error, after comparing its text with the pattern."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load_experts(checkpoint.write(directory, sharded=sharded), checkpoint.layer)
    return caught.value


def fail_written(directory: Path, message: str, layer: int = 1) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_experts(directory, layer)


def test_missing_and_surplus_tensors_are_listed_together(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.rename("2.w2.weight_scale", "2.w2.scales")
    del checkpoint.tensors[W1]
    error = fail(checkpoint, tmp_path, r"missing \(2 of 24 expected\): .*surplus \(1\)")
    assert isinstance(error, ValueError)
    assert error.missing == (W1, S2)
    assert error.surplus == (f"{KIMI_PREFIX}2.w2.scales",)
    assert all(name in str(error) for name in (*error.missing, *error.surplus))


def test_long_lists_are_cut_in_the_message_only(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.rename(".weight_packed", ".weight")
    error = fail(checkpoint, tmp_path, r"missing \(12 of 24 expected\): .* and 4 more; surplus \(12\)")
    assert len(error.missing) == len(error.surplus) == 12


@pytest.mark.parametrize("surplus", ["4.w1.weight_packed", "0.w4.weight_packed", "gate_up_proj", "00.w1.weight_packed"])
def test_surplus_tensors(surplus: str, tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.tensors[KIMI_PREFIX + surplus] = torch.zeros(1)
    error = fail(checkpoint, tmp_path, rf"surplus \(1\): {KIMI_PREFIX}{surplus}")
    assert error.missing == ()


def test_other_experts_may_be_incomplete(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    del checkpoint.tensors[S2]
    directory = checkpoint.write(tmp_path)
    load_experts(directory, 1, range(2))
    with pytest.raises(CheckpointError, match="missing") as caught:
        load_experts(directory, 1, range(1, 3))
    assert caught.value.missing == (S2,)


@pytest.mark.parametrize("sharded", [True, False])
def test_gpt_oss_missing_and_surplus(sharded: bool, tmp_path: Path) -> None:
    checkpoint = build.gpt_oss()
    del checkpoint.tensors[f"{GPT_OSS_PREFIX}down_proj_bias"]
    checkpoint.tensors[f"{GPT_OSS_PREFIX}down_proj"] = torch.zeros(1)
    error = fail(checkpoint, tmp_path, "missing.*surplus", sharded=sharded)
    assert error.missing == (f"{GPT_OSS_PREFIX}down_proj_bias",)
    assert error.surplus == (f"{GPT_OSS_PREFIX}down_proj",)


@pytest.mark.parametrize(
    ("builder", "name", "change", "message"),
    [
        (build.kimi_k3, W1, lambda t: t.T.contiguous(), r"has shape \[32, 96\] \(transposed\), expected \[96, 32\]"),
        (build.kimi_k3, W1, lambda t: t[:, :16].clone(), r"has shape \[96, 16\], expected \[96, 32\]"),
        (build.kimi_k3, W1, lambda t: t.view(torch.int8), "is I8, expected U8"),
        (build.kimi_k3, W1, lambda t: t.to(torch.bfloat16), "is BF16, expected U8"),
        (build.kimi_k3, S2, lambda t: t.float(), "is F32, expected U8 or F8_E8M0"),
        (build.kimi_k3, S2, lambda t: t.view(torch.float8_e4m3fn), "is F8_E4M3, expected U8 or F8_E8M0"),
        (build.kimi_k3, S2, lambda t: t.T.contiguous(), r"has shape \[3, 64\] \(transposed\), expected \[64, 3\]"),
        (build.kimi_k3_quark, S2, lambda t: t.reshape(-1), r"has shape \[192\], expected \[64, 3\]"),
        (build.kimi_k3_nvfp4, S2, lambda t: t.view(torch.uint8), "is U8, expected F8_E4M3"),
        (build.kimi_k3_nvfp4, S2 + "_2", lambda t: torch.ones(2), r"has shape \[2\], expected \[\]"),
        (build.kimi_k3_nvfp4, S2 + "_2", lambda t: t.double(), "is F64, expected F32"),
        (build.gpt_oss, BLOCKS, lambda t: t.mT.contiguous(), r"has shape \[4, 192, 16, 2\], expected \[4, 192, 2"),
        (build.gpt_oss, BLOCKS, lambda t: t.to(torch.int16), "is I16, expected U8"),
    ],
)  # fmt: skip
def test_dtypes_and_shapes(builder: Builder, name: str, change: Any, message: str, tmp_path: Path) -> None:
    checkpoint = builder()
    checkpoint.tensors[name] = change(checkpoint.tensors[name])
    error = fail(checkpoint, tmp_path, f"{name} {message}".replace(".", r"\.", name.count(".")))
    assert f"in {tmp_path / 'config.json'}" in str(error)
    assert error.missing == error.surplus == ()


@pytest.mark.parametrize(
    ("builder", "key", "value", "message"),
    [
        (build.kimi_k3, "routed_expert_hidden_size", 128, r"has shape \[96, 32\], expected \[96, 64\].*H=128, I=96"),
        (build.kimi_k3, "moe_intermediate_size", 64, r"has shape \[96, 32\], expected \[64, 32\]"),
        (build.kimi_k3, "num_experts", 5, r"missing \(6 of 30 expected\): .*experts\.4\.w1"),
        (build.kimi_k3, "num_experts", 3, r"surplus \(6\): .*experts\.3\.w1"),
        (build.kimi_k3, "num_experts_per_token", 9, "top_k 9 exceeds num_experts 4"),
        (build.kimi_k3, "moe_intermediate_size", 100, "intermediate_size 100 is no multiple of 32"),
        (build.kimi_k3, "num_experts", "4", "num_experts must be a positive integer, got '4'"),
        (build.kimi_k3, "num_experts", True, "num_experts must be a positive integer, got True"),
        (build.kimi_k3, "moe_intermediate_size", None, "lacks moe_intermediate_size"),
        (build.kimi_k3, "hidden_act", "silu", "hidden_act is 'silu', expected 'situ'"),
        (build.kimi_k3, "hidden_act", "telu", "hidden_act is 'telu', expected 'situ'"),
        (build.kimi_k3, "activation_situ_beta", None, "config.json: situ: beta must be a number, got None"),
        (build.kimi_k3, "activation_situ_beta", "4", "beta must be a number, got '4'"),
        (build.kimi_k3, "activation_situ_beta", 0.0, "beta must be greater than 0, got 0.0"),
        (build.kimi_k3, "first_k_dense_replace", 2, r"layer 1 is dense .*first_k_dense_replace 2"),
        (build.kimi_k3, "moe_layer_freq", 2, r"layer 1 is dense .*moe_layer_freq 2"),
        (build.kimi_k3, "num_hidden_layers", 1, r"layer 1 is outside 0:1 \(num_hidden_layers\)"),
        (build.gpt_oss, "num_local_experts", 8, r"has shape \[4, 192, 2, 16\], expected \[8, 192, 2, 16\].*E=8"),
        (build.gpt_oss, "intermediate_size", 64, r"has shape \[4, 192, 2, 16\], expected \[4, 128, 2, 16\]"),
        (build.gpt_oss, "hidden_act", "gelu", "hidden_act is 'gelu', expected 'silu' for gpt_oss"),
        (build.gpt_oss, "swiglu_limit", None, "lacks swiglu_limit"),
    ],
)  # fmt: skip
def test_config_against_tensors(builder: Builder, key: str, value: Any, message: str, tmp_path: Path) -> None:
    checkpoint = builder()
    checkpoint.text[key] = value
    fail(checkpoint, tmp_path, message)


@pytest.mark.parametrize("key", ["activation_situ_beta", "activation_situ_linear_beta"])
def test_missing_beta(key: str, tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    del checkpoint.text[key]
    fail(checkpoint, tmp_path, f"hidden_act 'situ' needs {key}.*, which is missing")


def _set(path: str, value: Any) -> Callable[[Checkpoint], None]:
    """Set a key, its parents separated by dots, in the quantisation section."""

    def change(checkpoint: Checkpoint) -> None:
        *parents, key = path.split("/")
        section = checkpoint.quantization
        for parent in parents:
            section = section[parent]
        section[key] = value

    return change


NVFP4_NAME = f"{KIMI_PREFIX}1.w3"


@pytest.mark.parametrize(
    ("builder", "change", "message"),
    [
        (build.kimi_k3, _set("config_groups/group_0/weights/group_size", 16), "group_size 16, expected 32"),
        (build.kimi_k3, _set("config_groups/group_0/weights/type", "int"), "type 'int', expected 'float'"),
        (build.kimi_k3, _set("config_groups/group_0/weights", None), "weights must be an object, got None"),
        (build.kimi_k3, _set("config_groups", []), r"config_groups must be an object, got \[\]"),
        (build.kimi_k3, _set("ignore", ["re:.*experts.*"]), "ignore says that .*experts.0.w1.* are not quantized"),
        (build.kimi_k3, _set("ignore", [f"{KIMI_PREFIX}3.w2"]), r"ignore says that \S*experts.3.w2 are not quantized"),
        (build.kimi_k3, _set("ignore", ["re:("]), r"ignore holds 're:\('"),
        (build.kimi_k3_quark, _set("export/pack_method", "zigzag"), "pack_method is 'zigzag'"),
        (build.kimi_k3_quark, _set("exclude", ["*block_sparse_moe*"]), "exclude says that .*experts.0.w1"),
        (build.kimi_k3_quark, _set("global_quant_config/weight/dtype", "fp8_e4m3"), "global_quant_config .*'fp8_e4m3'"),
        (build.kimi_k3_quark, _set("global_quant_config/weight/group_size", 16), "'group_size': 16.*'group_size': 32"),
        (build.kimi_k3_quark, _set("layer_quant_config/*experts.2*", {"weight": {}}), "layer_quant_config '.exp"),
        (build.kimi_k3_nvfp4, _set("quant_algo", "FP8"), "quant_algo is 'FP8', expected MIXED_PRECISION or NVFP4"),
        (build.kimi_k3_nvfp4, _set(f"quantized_layers/{NVFP4_NAME}", {"quant_algo": "FP8_PB_WO"}),
         "quantized_layers has .*1.w3 as .*FP8_PB_WO"),
        (build.kimi_k3_nvfp4,
         _set("quantized_layers/model.layers.1.mlp.experts", {"quant_algo": "NVFP4", "group_size": 32}),
         "quantized_layers has model.layers.1.mlp.experts as .*32"),
        (build.kimi_k3_nvfp4, lambda c: (_set("quantized_layers", {})(c), _set("exclude_modules", ["*experts.3*"])(c)),
         r"exclude_modules says with '\*experts.3\*' that \S*experts.3.w1 is not quantized"),
        (build.kimi_k3_nvfp4_packed, _set("config_groups/group_0/weights/group_size", 32), "group_size 32, exp"),
    ],
)  # fmt: skip
def test_quantisation_section_against_tensors(builder: Builder, change: Any, message: str, tmp_path: Path) -> None:
    checkpoint = builder()
    change(checkpoint)
    fail(checkpoint, tmp_path, message)


@pytest.mark.parametrize("named", [True, False])
def test_bf16_experts_in_a_quantized_checkpoint_are_refused(named: bool, tmp_path: Path) -> None:
    checkpoint = build.kimi_k3_nvfp4()
    base = f"{KIMI_PREFIX}1.w3"
    for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
        del checkpoint.tensors[f"{base}.{suffix}"]
    checkpoint.tensors[f"{base}.weight"] = torch.zeros(96, 64, dtype=torch.bfloat16)
    if not named:
        del checkpoint.quantization["quantized_layers"][base]
    error = fail(checkpoint, tmp_path, f"{base}.weight is BF16, expected U8")
    assert error.missing == (f"{base}.input_scale", f"{base}.weight_scale", f"{base}.weight_scale_2")


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "nan"), (float("inf"), "inf"), (-1.0, "-1.0")])
def test_global_scales_are_finite(value: float, shown: str, tmp_path: Path) -> None:
    checkpoint = build.kimi_k3_nvfp4()
    checkpoint.tensors[f"{KIMI_PREFIX}1.w3.weight_scale_2"] = torch.tensor(value)
    _, source = load_experts(checkpoint.write(tmp_path), 1)
    source.expert(0)
    with pytest.raises(CheckpointError, match=f"1.w3.weight_scale_2 is {shown}, expected a finite positive scale"):
        source.expert(1)


def test_reciprocal_scales_are_not_zero(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3_nvfp4_packed()
    checkpoint.tensors[f"{KIMI_PREFIX}1.w2.weight_global_scale"] = torch.zeros(1)
    _, source = load_experts(checkpoint.write(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"1\.w2\.weight_global_scale is 0\.0"):
        source.expert(1)


@pytest.mark.parametrize(
    ("builder", "change", "message"),
    [
        (build.kimi_k3, {"model_type": "llama"},
         "model_type 'llama' with compressed-tensors mxfp4-pack-quantized is not read"),
        (build.kimi_k3, {"model_type": None}, "model_type must be a string, got None"),
        (build.gpt_oss, {"quantization_config": {"quant_method": "quark"}},
         "'gpt_oss' with quark is not read; read are .*kimi_k3 with quark"),
        (build.gpt_oss, {"quantization_config": None}, "'gpt_oss' with no quantization_config is not read"),
        (build.gpt_oss, {"quantization_config": "mxfp4"}, "quantization_config must be an object, got 'mxfp4'"),
        (build.kimi_k3_nvfp4, {"quantization_config": {"quant_method": "awq"}}, "'kimi_k3' with awq is not read"),
        (build.kimi_k3, {"quantization_config": {"quant_method": "quark"}}, "two quantization_config that differ"),
        (build.gpt_oss, {"text_config": 3}, "text_config must be an object, got 3"),
    ],
)  # fmt: skip
def test_other_models_and_formats(builder: Builder, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = builder()
    directory = checkpoint.write(tmp_path)
    (directory / "config.json").write_text(json.dumps(checkpoint.config | change))
    fail_written(directory, message, checkpoint.layer)


def test_two_formats_at_once_are_refused(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.quantization["config_groups"]["group_1"] = {"format": "nvfp4-pack-quantized"}
    fail(checkpoint, tmp_path, "mxfp4-pack-quantized and compressed-tensors nvfp4-pack-quantized is not read")


def test_tensors_of_another_model(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.tensors = build.gpt_oss().tensors
    fail(
        checkpoint,
        tmp_path,
        r"missing \(24 of 24 expected\): .*the folder holds 6 tensors, such as model.layers.0",
    )


def test_a_config_of_one_format_and_tensors_of_another(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.tensors = build.kimi_k3_nvfp4().tensors
    error = fail(checkpoint, tmp_path, "missing.*surplus.*F8_E4M3")
    assert f"{KIMI_PREFIX}0.w1.weight_scale_2" in error.surplus


def test_experts_under_two_prefixes(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    other = W1.removeprefix("language_model.")
    checkpoint.tensors[other] = checkpoint.tensors[W1].clone()
    fail(
        checkpoint, tmp_path, "layer 1 has experts under two names, language_model.model.layers.1.* and model.layers.1"
    )


@pytest.mark.parametrize("layer", [-1, 3, 93])
def test_layers_outside_the_model(layer: int) -> None:
    fail_written(build.DATA / "kimi-k3-tiny", f"layer {layer} is outside 0:3", layer)
    fail_written(build.DATA / "gpt-oss-tiny", f"layer {layer} is outside 0:1", layer)


def test_a_dense_layer() -> None:
    fail_written(build.DATA / "kimi-k3-tiny", "layer 0 is dense and has no routed experts", 0)


def test_a_layer_that_is_not_in_the_folder() -> None:
    fail_written(build.DATA / "kimi-k3-nvfp4-tiny", r"missing \(48 of 48 expected\): \S*layers.2", 2)


@pytest.mark.parametrize("experts", [range(4, 6), range(0), range(2, 2), range(-1, 2), range(0, 4, 2), range(3, 0, -1)])
def test_expert_ranges(experts: range, tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    with pytest.raises(ValueError, match=r"non-empty contiguous range within 0:4, got range\("):
        load_experts(directory, 1, experts)


def test_argument_types(tmp_path: Path) -> None:
    directory = build.kimi_k3().write(tmp_path)
    with pytest.raises(TypeError, match="experts must be a range, got 3"):
        load_experts(directory, 1, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layer must be an int, got '1'"):
        load_experts(directory, "1")  # type: ignore[arg-type]
    for shares in ((2, 2), (-1, 2), (0, 0), 2, (0.0, 1)):
        with pytest.raises(ValueError, match="tensor_parallel must be"):
            load_experts(directory, 1, tensor_parallel=shares)  # type: ignore[arg-type]


def test_a_share_that_cuts_a_block() -> None:
    with pytest.raises(ValueError, match="192 over 4 ranks gives 48 values a rank, no multiple of 32"):
        load_experts(build.DATA / "kimi-k3-tiny", 1, tensor_parallel=(0, 4))
    spec, _ = load_experts(build.DATA / "kimi-k3-nvfp4-tiny", 1, tensor_parallel=(3, 4))
    assert spec.intermediate_size == 48  # three blocks of 16


def test_a_reciprocal_beyond_float32_is_refused(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3_nvfp4_packed()
    name = f"{KIMI_PREFIX}0.w1.weight_global_scale"
    checkpoint.tensors[name] = torch.tensor([1e-40])
    _, source = load_experts(checkpoint.write(tmp_path), checkpoint.layer)
    with pytest.raises(CheckpointError, match=r"w1.weight_global_scale is 9\.99.*e-41, its reciprocal is no finite"):
        source.expert(0)


def test_zero_points_are_refused(tmp_path: Path) -> None:
    checkpoint = build.kimi_k3()
    checkpoint.quantization["config_groups"]["group_0"]["weights"]["symmetric"] = False
    fail(checkpoint, tmp_path, "symmetric False, expected True: zero points are not built")
