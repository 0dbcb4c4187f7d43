"""vLLM's own objects around a problem of ours: configs, loaded layers, references."""

import contextlib
from dataclasses import replace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.quantization import get_quantization_config

from portamoe.activations import SiTU
from portamoe.spec import MoESpec
from portamoe.testing import make_problem

SPEC = MoESpec(
    hidden_size=128, intermediate_size=256, num_experts=16, top_k=4, activation=SiTU(beta=4.0, linear_beta=25.0)
)
#: vLLM's names of a checkpoint's matrices, and which rows of our w13 they are.
SHARDS = ("w1", "w3", "w2")


def parallel(tp=1, ep=1, rank=0, **changes):
    """Return the parallel layout of one of `tp` tensor-parallel or `ep` expert-parallel ranks."""
    values = {
        "tp_size": tp, "pcp_size": 1, "dp_size": 1, "ep_size": ep, "tp_rank": rank if tp > 1 else 0, "pcp_rank": 0,
        "dp_rank": 0, "ep_rank": rank if ep > 1 else 0, "sp_size": 1, "use_ep": ep > 1,
        "all2all_backend": "allgather_reducescatter", "enable_eplb": False,
    }  # fmt: skip
    return FusedMoEParallelConfig(**(values | changes))


def moe_config(spec=SPEC, tp=1, ep=1, rank=0, parallel_changes=None, **changes):
    """Return vLLM's config of the layer of which `spec` is the whole."""
    values = {
        "num_experts": spec.num_experts,
        "experts_per_token": spec.top_k,
        "hidden_dim": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_local_experts": spec.num_experts // ep,
        "num_logical_experts": spec.num_experts,
        "activation": MoEActivation.SITU,
        "device": "cpu",
        "routing_method": RoutingMethodType.DeepSeekV3,
        "moe_parallel_config": parallel(tp, ep, rank, **(parallel_changes or {})),
        "in_dtype": torch.bfloat16,
        "router_logits_dtype": torch.float32,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
    }
    return FusedMoEConfig(**(values | changes))


@contextlib.contextmanager
def as_vllm_builds():
    """Set what vLLM sets while it builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(VllmConfig()):
            yield
    finally:
        torch.set_default_dtype(before)


def load(problem, moe, placement="linear", prepare=True):
    """Return vLLM's RoutedExperts with the problem's weights, given to its own loader one matrix at a time."""
    spec = problem.spec
    quant = get_quantization_config("mxfp4").from_config({})
    with as_vllm_builds():
        manager = ExpertMapManager(
            max_num_batched_tokens=64,
            top_k=spec.top_k,
            global_num_experts=spec.num_experts,
            num_redundant_experts=0,
            num_expert_group=4 if placement == "round_robin" else None,  # vLLM does it only for groups
            moe_parallel_config=moe.moe_parallel_config,
            placement_strategy=placement,
            enable_eplb=False,
        )
        layer = RoutedExperts(
            "experts", torch.bfloat16, moe, quant, manager,
            ckpt_gate_proj_name="w1", ckpt_down_proj_name="w2", ckpt_up_proj_name="w3",
        )  # fmt: skip
        for expert_id in range(spec.num_experts):
            load_expert(layer, problem, expert_id)
        if prepare:
            layer.quant_method.process_weights_after_loading(layer)
    return layer


def load_expert(layer, problem, expert_id):
    """Give one expert's matrices and scales to vLLM's loader; returns whether they belong here."""
    expert, inter = problem.weights.expert(expert_id), problem.spec.intermediate_size
    whole = {
        ("w13_weight", "w1"): expert.w13[:inter],
        ("w13_weight", "w3"): expert.w13[inter:],
        ("w2_weight", "w2"): expert.w2,
        ("w13_weight_scale", "w1"): expert.w13_scale[:inter],
        ("w13_weight_scale", "w3"): expert.w13_scale[inter:],
        ("w2_weight_scale", "w2"): expert.w2_scale,
    }
    taken = set()
    for (name, shard), tensor in whole.items():
        parameter = getattr(layer, name)
        taken.add(
            layer.weight_loader(parameter, tensor, f"experts.{expert_id}.{name}", shard, expert_id, return_success=True)
        )
    assert len(taken) == 1
    return taken.pop()


def problem_of(spec=SPEC, tokens=6, **changes):
    """Return a problem whose ids are int32 and hold a -1."""
    problem = make_problem(spec, tokens, **changes)
    problem.topk_ids[0, 1] = -1
    return problem


def forward(layer, problem, ids=None):
    """Call the layer as vLLM's runner does."""
    with set_current_vllm_config(VllmConfig()):
        return layer.forward_modular(problem.x, problem.topk_weights, problem.topk_ids if ids is None else ids)


def of_ranks(problem, first, count):
    """Return the reference of the experts first … first + count - 1."""
    spec = replace(problem.spec, local_experts=range(first, first + count))
    weights = type(problem.weights)(
        **{n: v[first : first + count] for n, v in vars(problem.weights).items() if v is not None}
    )
    return replace(problem, spec=spec, weights=weights).reference()
