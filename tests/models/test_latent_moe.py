"""Kimi-K3's whole MoE block on the CPU: expected outputs, every rule of the config, ranks, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from portamoe import projections
from portamoe.checkpoints import Checkpoint, CheckpointError
from portamoe.layer import RoutedExperts
from portamoe.models._block_ops import TorchOps
from portamoe.models.kimi_k3 import LatentMoE
from portamoe.testing import error_metrics

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "kimi-k3-tiny"
BLOCK = "language_model.model.layers.1.block_sparse_moe."
SHARD = "model-00001-of-000003.safetensors"


def expected(layer: int = 1) -> dict:
    return load_file(TINY / "expected" / f"layer_{layer}.safetensors")


def build(checkpoint=TINY, layer: int = 1, **options) -> LatentMoE:
    options = {"max_tokens": 16, "device": "cpu", "dtype": torch.float32} | options
    return LatentMoE.from_checkpoint(checkpoint, layer, **options)


def rms(actual, wanted) -> float:
    return error_metrics(actual, wanted).rms


def copy_of_tiny(directory: Path, **changes) -> Path:
    """Copy the tiny checkpoint with keys of text_config changed, or removed (None)."""
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("expected"))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del config["text_config"][key]
        else:
            config["text_config"][key] = value
    path.write_text(json.dumps(config))
    return directory


def edit(directory: Path, name: str, value) -> None:
    """Replace one tensor of the block, or drop it (None), in its shard and in the index."""
    index_path = directory / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    path = directory / index["weight_map"].get(BLOCK + name, SHARD)
    tensors = load_file(path)
    if value is None:
        del tensors[BLOCK + name], index["weight_map"][BLOCK + name]
    else:
        tensors[BLOCK + name] = value
        index["weight_map"][BLOCK + name] = path.name
    save_file(tensors, path)
    index_path.write_text(json.dumps(index))


@pytest.mark.parametrize("layer", [1, 2])
def test_float32_reproduces_the_expected_block(layer):
    data = expected(layer)
    block = build(layer=layer)
    assert rms(block(data["hidden"].float()), data["block_out"]) <= 1e-5
    assert rms(block._shared(data["hidden"].float()), data["shared_out"]) <= 1e-5


@pytest.mark.parametrize("layer", [1, 2])
def test_bf16_is_within_its_roundings(layer):
    data = expected(layer)
    assert rms(build(layer=layer, dtype=torch.bfloat16)(data["hidden"]), data["block_out"]) <= 0.006


def test_the_router_chooses_and_weighs_as_expected():
    data = expected()
    ids, weights = build()._route(data["hidden"].float())
    assert torch.equal(ids, data["topk_ids"])
    assert torch.allclose(weights, data["topk_weights"], rtol=1e-5)


def test_the_bias_takes_part_in_the_selection_only(tmp_path):
    """A bias that is the same for all changes nothing; it would if it entered the weights."""
    directory = copy_of_tiny(tmp_path / "c")
    bias = load_file(directory / SHARD)[f"{BLOCK}gate.e_score_correction_bias"]
    edit(directory, "gate.e_score_correction_bias", bias + 5.0)
    data = expected()
    assert rms(build(directory)(data["hidden"].float()), data["block_out"]) <= 1e-5


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("use_norm", [True, False])
def test_the_scaling_factor_multiplies_the_experts_before_the_norm(factor, use_norm, tmp_path):
    """With the norm it drops out but for eps, which counts for the small tokens; without, it scales the routed part."""
    hidden, plain = expected()["hidden"].float(), build()
    directory = copy_of_tiny(tmp_path / "c", routed_scaling_factor=factor, latent_moe_use_norm=use_norm)
    if not use_norm:
        edit(directory, "routed_expert_norm.weight", None)
    ids, weights = plain._route(hidden)
    routed = factor * plain.experts(hidden @ plain._down.T, ids, weights)
    if use_norm:
        routed = routed / (routed.square().mean(1, keepdim=True) + 1e-5).sqrt() * plain._norm
    assert rms(build(directory)(hidden), routed @ plain._up.T + plain._shared(hidden)) <= 1e-5


def test_eps_is_the_configs(tmp_path):
    """Two tokens are small enough for eps to count."""
    block = build(copy_of_tiny(tmp_path / "c", rms_norm_eps=1e3))
    data = expected()
    assert block.config.norm_eps == 1e3
    assert rms(block(data["hidden"].float()), data["block_out"]) > 0.01


def test_weights_need_not_add_up_to_one(tmp_path):
    block = build(copy_of_tiny(tmp_path / "c", moe_renormalize=False))
    _, weights = block._route(expected()["hidden"].float())
    assert not torch.allclose(weights.sum(1), torch.ones(9))


def test_shapes_layouts_and_no_tokens():
    hidden = expected()["hidden"].float()
    block = build()
    wanted = block(hidden)
    assert torch.equal(block(hidden.view(3, 3, -1)), wanted.view(3, 3, -1))
    strided = torch.cat([hidden, hidden], 1)[:, :512]
    assert not strided.is_contiguous()
    assert torch.equal(block(strided), wanted)
    assert block(hidden[:0]).shape == (0, 512)
    assert torch.equal(block(hidden[4]), block(hidden[4:5])[0])


@pytest.mark.parametrize(("ranks", "by"), [(2, "experts"), (4, "experts"), (2, "intermediate")])
def test_ranks_reduce_to_the_whole(ranks, by):
    """Every rank's partial sums, reduced by the hook before the norm, give one process's block."""
    data = expected()
    hidden = data["hidden"].float()
    partial: list[dict[tuple[int, ...], torch.Tensor]] = [{} for _ in range(ranks)]

    def rank_block(rank: int, reduce) -> LatentMoE:
        part = 16 // ranks
        split = {"experts": range(rank * part, (rank + 1) * part)} if by == "experts" else {}
        split |= {} if by == "experts" else {"tensor_parallel": (rank, ranks)}
        return build(shared_parallel=(rank, ranks), reduce=reduce, **split)

    for rank in range(ranks):

        def collect(tensor, rank=rank):
            partial[rank][tuple(tensor.shape)] = tensor.clone()
            return tensor

        rank_block(rank, collect)(hidden)
    assert all(set(sums) == {(9, 256), (9, 512)} for sums in partial)

    def total(tensor):
        return sum(sums[tuple(tensor.shape)] for sums in partial)

    for rank in range(ranks):
        assert rms(rank_block(rank, total)(hidden), data["block_out"]) <= 1e-5


def test_a_part_without_a_reduction_is_refused_before_weights_are_prepared():
    def progress(done, total):
        raise AssertionError("experts were prepared")

    for part in ({"experts": range(8)}, {"tensor_parallel": (0, 2)}):
        with pytest.raises(ValueError, match=r"holds a part of the routed experts .* pass reduce"):
            build(progress=progress, **part)
    with pytest.raises(ValueError, match=r"hold 96 of 192 intermediate values .* pass reduce"):
        build(shared_parallel=(1, 2))
    for wrong in ((2, 2), (0, 0), 2):
        with pytest.raises(ValueError, match="shared_parallel must be"):
            build(shared_parallel=wrong)
    with pytest.raises(ValueError, match="192 intermediate values cannot be split over 5 ranks"):
        build(shared_parallel=(0, 5), reduce=lambda t: t)


def test_experts_that_hold_a_slice_need_a_reduction_too():
    checkpoint = Checkpoint(TINY)
    experts = RoutedExperts(*checkpoint.experts(1, tensor_parallel=(0, 2)), max_tokens=8, device="cpu")
    with pytest.raises(ValueError, match=r"holds a part of the routed experts .*intermediate values.* pass reduce"):
        LatentMoE(*checkpoint.block(1), experts)
    with pytest.raises(TypeError, match="reduce is 3, expected a function"):
        LatentMoE(*checkpoint.block(1), experts, reduce=3)


def test_inputs_are_checked():
    block = build()
    hidden = expected()["hidden"].float()
    with pytest.raises(ValueError, match=r"expected \(..., 512\)"):
        block(hidden[:, :256])
    with pytest.raises(TypeError, match=r"the block was made for torch.float32"):
        block(hidden.bfloat16())
    with pytest.raises(ValueError, match=r"made for max_tokens=16"):
        block(torch.zeros(17, 512))
    with pytest.raises(RuntimeError, match="no backward"):
        block(hidden.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="graphs need a GPU"):
        block.capture([1])
    with pytest.raises(ValueError, match="no graph was captured for 1 tokens"):
        block.decode_graph(1)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"dtype is torch.float16"):
        build(dtype=torch.float16)
    with pytest.raises(ValueError, match="kernels must be"):
        build(kernels="cuda")
    with pytest.raises(ValueError, match=r"dtype: torch.float32 \(needs torch.bfloat16\); device: cpu \(needs a GPU\)"):
        build(kernels="triton")
    with pytest.raises(ValueError, match="overlap needs a GPU"):
        build(overlap=True)
    config, weights = Checkpoint(TINY).block(1)
    spec, source = Checkpoint(TINY).experts(1)
    experts = RoutedExperts(spec, source, max_tokens=4, device="cpu")
    with pytest.raises(ValueError, match="latent size is 512, the experts' 256"):
        LatentMoE(replace(config, latent_size=512), weights, experts)
    with pytest.raises(ValueError, match="top_k is 5, the experts' 4"):
        LatentMoE(replace(config, router=replace(config.router, top_k=5)), weights, experts)
    with pytest.raises(ValueError, match="activation is"):
        LatentMoE(replace(config, activation=replace(config.activation, beta=3.0)), weights, experts)


def test_a_block_of_one_layer_with_the_experts_of_another_is_refused():
    checkpoint = Checkpoint(TINY)
    spec, source = checkpoint.experts(1)
    experts = RoutedExperts(spec, source, max_tokens=16, device="cpu")
    with pytest.raises(
        ValueError, match=r"block's weights are layer 2 of .*, the experts layer 1 of .*from_checkpoint"
    ):
        LatentMoE(*checkpoint.block(2), experts)
    config, weights = Checkpoint(TINY).block(1)
    good = LatentMoE(config, weights, experts, dtype=torch.float32)
    values = expected()
    assert rms(good(values["hidden"].float()), values["block_out"]) <= 1e-5
    with pytest.raises(ValueError, match=r"weights.up has shape \(256, 512\), expected \(512, 256\)"):
        LatentMoE(config, replace(weights, up=weights.up.T), experts)
    with pytest.raises(ValueError, match=r"the weights have no latent norm, but norm_eps is 1e-05"):
        LatentMoE(config, replace(weights, norm=None), experts)


def test_a_reduction_that_returns_nothing_is_told_to():
    block = build(experts=range(8), reduce=lambda partial: None)
    with pytest.raises(
        TypeError, match=r"reduce returned None, expected torch.float32 \(3, 256\); one that adds in place"
    ):
        block(torch.zeros(3, 512))


def test_only_projections_right_behind_a_kernel_of_the_block_are_launched_dependent(monkeypatch):
    """The first product of a stream, and the one behind the experts, never are; all give the same result."""
    data, seen = expected(), []

    def linear(x, weight, residual=None, *, pdl=False):
        seen.append((tuple(weight.shape), pdl))
        y = x @ weight.T
        return y if residual is None else y + residual

    monkeypatch.setattr(projections, "linear", linear)
    block = build()
    assert rms(block._run(data["hidden"].float(), dependent=True), data["block_out"]) <= 1e-5
    down, gate_up, shared_down, up = (256, 512), (384, 512), (512, 192), (512, 256)
    assert seen == [(down, False), (gate_up, False), (shared_down, True), (up, True)]
    seen.clear()
    block._shared(data["hidden"].float(), behind_routing=True, dependent=True)
    assert seen == [(gate_up, True), (shared_down, True)]
    seen.clear()
    block(data["hidden"].float())
    assert not any(pdl for _, pdl in seen)
    no_norm = replace(block.config, norm_eps=None)
    block.config = no_norm
    seen.clear()
    block._run(data["hidden"].float(), dependent=True)
    assert seen[-1] == (up, False)


def test_it_has_no_state_and_stays_where_it_is():
    block = build()
    assert not list(block.parameters())
    assert not block.state_dict()
    assert "latent=256" in repr(block)
    assert isinstance(block._ops, TorchOps)
    assert block.to(torch.float64).dtype == torch.float32
    with pytest.raises(RuntimeError, match="cannot move"):
        block.to("meta")


def test_one_checkpoint_serves_all_layers(monkeypatch):
    from portamoe.checkpoints import _safetensors

    checkpoint = Checkpoint(TINY)
    monkeypatch.setattr(_safetensors, "_weight_map", lambda path: pytest.fail("the index was read again"))
    for layer in (1, 2):
        data = expected(layer)
        assert rms(build(checkpoint, layer)(data["hidden"].float()), data["block_out"]) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor must be a positive number, got None"),
        ({"moe_renormalize": 1}, "moe_renormalize must be true or false, got 1"),
        ({"latent_moe_use_norm": None}, "latent_moe_use_norm must be true or false, got None"),
        ({"activation_situ_beta": True}, "config.json: situ: beta must be a number, got True"),
        ({"activation_situ_beta": -1.0}, r"config.json: situ: beta .*-1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"num_experts_per_token": 17}, "num_experts_per_token is 17, expected at most num_experts 16"),
        ({"num_expert_group": 2}, "num_expert_group is 2, expected 1"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax', expected 'sigmoid'"),
        ({"moe_router_activation_func": None}, "moe_router_activation_func is None, expected 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
        ({"topk_method": None}, "topk_method is None, expected 'noaux_tc'"),
        ({"num_shared_experts": 2}, r"shared_experts.down_proj.weight has shape \[512, 192\], expected \[512, 384\]"),
        ({"routed_expert_hidden_size": None}, "lacks routed_expert_hidden_size"),
        ({"latent_moe_use_norm": False}, r"surplus \(1\): .*routed_expert_norm.weight"),
    ],
)
def test_configs_that_contradict_or_lack_something(changes, message, tmp_path):
    checkpoint = Checkpoint(copy_of_tiny(tmp_path / "c", **changes))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.block(1)


def test_tensors_that_are_missing_surplus_or_misshapen(tmp_path):
    directory = copy_of_tiny(tmp_path / "c")
    edit(directory, "gate.weight", None)
    edit(directory, "gate.extra", torch.zeros(3))
    edit(directory, "routed_expert_up_proj.weight", torch.zeros(256, 512, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory).block(1)
    assert caught.value.missing == (f"{BLOCK}gate.weight",)
    assert caught.value.surplus == (f"{BLOCK}gate.extra",)
    assert "up_proj.weight has shape [256, 512] (transposed), expected [512, 256]" in str(caught.value)


def test_tensors_that_are_read_as_one_have_one_dtype(tmp_path):
    """Of an F32 up behind a BF16 gate half the bytes would be read, as BF16."""
    directory = copy_of_tiny(tmp_path / "c")
    name = "shared_experts.up_proj.weight"
    _, right = Checkpoint(directory).block(1)
    up = right.shared_gate_up[right.shared_gate_up.shape[0] // 2 :]
    edit(directory, name, up.float())
    with pytest.raises(CheckpointError, match=r"gate_proj.weight is BF16 and .*up_proj.weight F32"):
        Checkpoint(directory).block(1)
    edit(directory, name, up.clone())
    assert torch.equal(Checkpoint(directory).block(1)[1].shared_gate_up, right.shared_gate_up)


def test_other_models_and_dense_layers():
    with pytest.raises(CheckpointError, match="only Kimi-K3 has a latent MoE block"):
        Checkpoint(DATA / "gpt-oss-tiny").block(0)
    with pytest.raises(CheckpointError, match="layer 0 is dense"):
        Checkpoint(TINY).block(0)
    with pytest.raises(TypeError, match="layer must be an int"):
        Checkpoint(TINY).block(True)
