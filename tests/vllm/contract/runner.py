"""vLLM's whole MoE layer, FusedMoEFactory and MoERunner, in a process group of one."""

import contextlib
import socket

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

from tests.vllm.contract.layers import load_expert

#: Sigmoid scores and a correction bias for the selection only, as Kimi-K3's router has them.
ROUTER = {
    "renormalize": True,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "activation": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "ckpt_names": ("w1", "w2", "w3"),
}


def eager_config():
    """Return a config without graphs, as --enforce-eager sets it: the backend torch cannot be captured."""
    config = VllmConfig()
    config.compilation_config.max_cudagraph_capture_size = 0
    return config


@contextlib.contextmanager
def one_process_group():
    """Make vLLM's parallel groups over gloo, with nobody else in them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = eager_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            yield config
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def run_layer(problem, quant, config):
    """Return the runner's result for the problem's tokens, and the ids and weights that it should have used."""
    spec = problem.spec
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(spec.num_experts, generator=generator)
    logits = torch.randn(problem.x.shape[0], spec.num_experts, generator=generator)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        runner = FusedMoEFactory(
            spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size, params_dtype=torch.bfloat16,
            quant_config=quant, prefix="model.layers.1.experts", e_score_correction_bias=bias,
            router_logits_dtype=torch.float32, **ROUTER,
        )  # fmt: skip
        layer = runner.routed_experts
        for expert_id in range(spec.num_experts):
            load_expert(layer, problem, expert_id)
        layer.quant_method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(before)
    with set_forward_context(None, config, num_tokens=problem.x.shape[0]), torch.inference_mode():
        y = runner.forward(problem.x.clone(), logits)
    scores = logits.sigmoid()
    ids = (scores + bias).topk(spec.top_k, dim=1).indices
    weights = scores.gather(1, ids)
    return y, ids.int(), weights / weights.sum(1, keepdim=True)
