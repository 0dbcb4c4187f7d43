"""Specs of every mode, problems that its kernels can express, and one call of a backend."""

import dataclasses

import torch

from cuda_moe.flashinfer.cutedsl import BACKEND as CUTEDSL
from cuda_moe.flashinfer.cutlass import BACKEND as CUTLASS
from cuda_moe.flashinfer.trtllm import BACKEND as TRTLLM
from portamoe.activations import SiTU
from portamoe.spec import MoESpec

NVFP4_TINY = "tests/data/kimi-k3-nvfp4-tiny"
MXFP4_TINY = "tests/data/kimi-k3-tiny"
SPEC = MoESpec(hidden_size=256, intermediate_size=192, num_experts=8, top_k=3, activation=SiTU(4.0, 25.0))
#: (backend, weights, activations, first version): every mode of the table.
MODES = {
    "cutedsl_w4a4": (CUTEDSL, "nvfp4", "nvfp4", "0.6.18"),
    "cutedsl_w4a16": (CUTEDSL, "nvfp4", "bf16", "0.7.0"),
    "cutedsl_w4a8": (CUTEDSL, "mxfp4", "mxfp8", "0.7.4"),
    "trtllm_nvfp4": (TRTLLM, "nvfp4", "nvfp4", "0.7.0"),
    "trtllm_mxfp8": (TRTLLM, "mxfp4", "mxfp8", "0.7.0"),
    "trtllm_bf16": (TRTLLM, "mxfp4", "bf16", "0.7.0"),
    "cutlass_w4a16": (CUTLASS, "mxfp4", "bf16", "0.7.0"),
}
NAMES = tuple(MODES)


def mode(name, **changes):
    backend, weights, activations, version = MODES[name]
    spec = dataclasses.replace(SPEC, weight_format=weights, activation_format=activations, **changes)
    return backend, spec, version


def one_scale(problem):
    """Give w1 and w3 one global scale, which is what kernels take; make_problem draws two."""
    weights = problem.weights
    if weights.w13_global_scale is None:
        return problem
    shared = weights.w13_global_scale[:, :1].repeat(1, 2)
    return dataclasses.replace(problem, weights=dataclasses.replace(weights, w13_global_scale=shared))


def run(backend, spec, weights, x, ids, topk_weights, *, max_local_rows=None, prepared=None):
    prepared = prepared or backend.prepare(weights, spec, torch.device("cpu"))
    rows = max_local_rows or backend.default_max_local_rows(spec, x.shape[0])
    workspace = torch.full((backend.workspace_bytes(spec, x.shape[0], rows),), 0xFF, dtype=torch.uint8)
    out = torch.full_like(x, torch.nan)
    backend.forward(prepared, x, ids, topk_weights, workspace, out, max_local_rows=rows)
    return out


def run_problem(backend, problem, **kwargs):
    fields = (problem.weights, problem.x, problem.topk_ids, problem.topk_weights)
    return run(backend, problem.spec, *fields, **kwargs)


def roundings(spec):
    return 4 if spec.activation_format == "bf16" else spec.activation_format
