"""Run as a script under Triton's interpreter: the block's kernels against plain torch; prints one JSON line a case."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "cuda"))

import interpreter
import torch

from portamoe.activations import SiTU
from portamoe.models._block_ops import TorchOps, TritonOps, choose, partial_logits, router_logits
from portamoe.routing import SigmoidRouter

NAN, INF = float("nan"), float("inf")
OURS, PLAIN = TritonOps(), TorchOps()


def _close(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def logits() -> dict[str, float]:
    """Parts of D that do not divide it, experts that do not fill a tile, tokens beyond one."""
    out = {}
    for tokens, experts, width in ((1, 16, 512), (17, 40, 1800), (5, 24, 4000)):
        x, w = (torch.randn(n, width).bfloat16() for n in (tokens, experts))
        out[f"{tokens}x{experts}x{width}"] = _close(partial_logits(x, w).sum(0), router_logits(x.double(), w.double()))
    return out


def routes() -> dict[str, bool]:
    """Ids as SigmoidRouter chooses them, weights within float32."""
    out = {}
    for name, rule, experts in (
        ("kimi", SigmoidRouter(4), 16),
        ("factor", SigmoidRouter(3, routed_scaling_factor=2.5), 24),
        ("plain", SigmoidRouter(5, renormalize=False), 24),
        ("all", SigmoidRouter(24), 24),
    ):
        partial, bias = torch.randn(3, 7, experts), torch.randn(experts) * 0.3
        ids, weights = choose(partial, bias, rule)
        wanted_ids, wanted = rule(partial[0] + partial[1] + partial[2], bias)
        out[name] = torch.equal(ids, wanted_ids) and _close(weights, wanted) < 1e-6
    return out


def ties() -> dict[str, bool]:
    """Equal, zero, infinite and NaN scores, and a NaN bias."""
    rule = SigmoidRouter(4)
    rows = {
        "equal": [0.5] * 8,
        "nan": [1.0, NAN, 0.5, NAN, NAN, NAN, NAN, 0.25],
        "infinite": [-INF, INF, 1.0, INF, -INF, 0.0, NAN, -1.0],
        "all_nan": [NAN] * 8,
        "tiny": [-200.0] * 8,
    }
    biases = {"none": [0.0] * 8, "negative": [-0.5, -0.0, 0.0, -0.5, -2.0, -1.0, 0.0, -0.0], "nan": [NAN, 0.0] * 4}
    out = {}
    for name, row in rows.items():
        for kind, values in biases.items():
            logits, bias = torch.tensor([row]), torch.tensor(values)
            ids, weights = choose(logits[None], bias, rule)
            wanted_ids, wanted = rule(logits, bias)
            out[f"{name}/{kind}"] = torch.equal(ids, wanted_ids) and torch.allclose(
                weights, wanted, rtol=1e-5, atol=1e-30
            )
    return out


def situ() -> dict[str, float]:
    """Saturated and small values, with and without a bound on up, a size that fills no block."""
    out = {}
    for scale in (1e-3, 1.0, 40.0):
        for linear_beta in (25.0, None):
            gate_up = (torch.randn(3, 2 * 1100) * scale).bfloat16()
            activation = SiTU(4.0, linear_beta)
            wanted = activation.apply(gate_up.double())
            out[f"{scale}/{linear_beta}"] = _close(OURS.activate(gate_up, activation), wanted)
    return out


def situ_float32() -> dict[str, float]:
    """Without a rounding to bf16 the formula itself shows: the series, the cancellation near it, saturation."""
    out = {}
    for scale in (1e-3, 0.5, 1.0, 40.0):
        gate_up = torch.randn(3, 2 * 1100) * scale
        activation = SiTU(4.0, 25.0)
        out[f"{scale}"] = _close(OURS.activate(gate_up, activation), activation.apply(gate_up.double()))
    return out


def norms() -> dict[str, float]:
    """A width that is no power of two, and rows so small that eps counts."""
    out = {}
    for scale in (1.0, 1e-3):
        x, weight = (torch.randn(5, 200) * scale).bfloat16(), torch.randn(200).bfloat16()
        wanted = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
        out[f"{scale}"] = _close(OURS.norm(x, weight, 1e-5), wanted)
        out[f"{scale}/torch"] = _close(PLAIN.norm(x, weight, 1e-5), wanted)
    return out


CASES = {"logits": logits, "routes": routes, "ties": ties, "situ": situ, "situ_float32": situ_float32, "norms": norms}

if __name__ == "__main__":
    interpreter.patch()
    torch.manual_seed(0)
    for case, run in CASES.items():
        print(json.dumps({"case": case, **run()}), flush=True)  # noqa: T201
