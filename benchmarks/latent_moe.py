"""Kimi-K3's whole MoE block at decode, on a GPU: correctness, time and launches by graph replay, a stress run.

    python benchmarks/latent_moe.py [--tokens 1,2,4,8,16] [--json FILE] [--stress 100000]

Real sizes with random weights, one rank's share at EP8: 112 of 896 experts, the rest of the block whole, and once more
with an eighth of the shared experts. Times are medians of replays of one graph that calls the block once for every
input set; 380 MB of weights stream through each call, so nothing stays in the L2 cache. The floor is the sum of the
floors of all products: every matrix, and every expert that is hit, read once at the read rate of the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from portamoe.checkpoints.kimi_block import BlockConfig, BlockWeights
from portamoe.cli._cases import expert_bytes
from portamoe.cli._measure import eager_us, launches, limits, time_graph
from portamoe.gpu_timing import median_ms
from portamoe.layer import RoutedExperts
from portamoe.models._block_ops import partial_logits
from portamoe.models.kimi_k3 import LatentMoE
from portamoe.reference import moe_reference
from portamoe.routing import SigmoidRouter
from portamoe.spec import KIMI_K3
from portamoe.testing import error_metrics, make_problem

D, H, S, E = 7168, 3584, 6144, 896
SPEC = replace(KIMI_K3, local_experts=range(112))
CONFIG = BlockConfig(D, H, S, SPEC.intermediate_size, E, SigmoidRouter(16), SPEC.activation, 1e-5)  # type: ignore[arg-type]
DEVICE = torch.device("cuda", 0)
#: Relative RMS of a bf16 block against float32.
TOLERANCE = 0.006


def torch_linear(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The products of the compared block: torch.mm, and an addition of its own."""
    y = torch.mm(x, weight.T)
    return y if residual is None else y + residual


def plain_sum(partial: torch.Tensor) -> torch.Tensor:
    """The reduction of a single rank."""
    return partial


def make_weights(seed: int = 0, share: int = 1) -> BlockWeights:
    """Random weights that give the experts and SiTU values of the size that real ones see."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def draw(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, device=DEVICE) * std / columns**0.5).bfloat16()

    return BlockWeights(
        router=draw(E, D, 1.0),
        correction_bias=torch.randn(E, generator=generator, device=DEVICE) * 0.02,
        down=draw(H, D, 1.0),
        up=draw(D, H, 1.0),
        norm=(1 + 0.1 * torch.randn(H, generator=generator, device=DEVICE)).bfloat16(),
        shared_gate_up=draw(2 * S // share, D, 8.0),
        shared_down=draw(D, S // share, 0.1),
    )


def make_hidden(tokens: int, sets: int) -> list[torch.Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    return [torch.randn(tokens, D, generator=generator, device=DEVICE).bfloat16() for _ in range(sets)]


def reference(weights: BlockWeights, experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The block in float32, the experts' input rounded to bf16 as every backend takes it."""
    x = hidden.float()
    ids, w = CONFIG.router(x @ weights.router.float().T, weights.correction_bias)
    routed = moe_reference(SPEC, experts, (x @ weights.down.float().T).bfloat16().float(), ids, w)
    norm = routed * torch.rsqrt(routed.square().mean(1, keepdim=True) + 1e-5) * weights.norm.float()  # type: ignore[union-attr]
    gate, up = (x @ weights.shared_gate_up.float().T).chunk(2, 1)
    return norm @ weights.up.float().T + CONFIG.activation(gate, up) @ weights.shared_down.float().T


def floor_us(weights: BlockWeights, hidden: list[torch.Tensor], read_tbs: float) -> dict[str, float]:
    """µs of each product at the read rate: its matrix once; for the experts those that are hit."""
    hit = 0.0
    for x in hidden:
        ids, _ = CONFIG.router(x.float() @ weights.router.float().T, weights.correction_bias)
        hit += ids[ids < SPEC.num_local_experts].unique().numel() / len(hidden)
    parts = {
        "router": weights.router.nbytes,
        "down": weights.down.nbytes,
        "experts": hit * expert_bytes(SPEC),
        "up": weights.up.nbytes,
        "shared": weights.shared_gate_up.nbytes + weights.shared_down.nbytes,
    }
    out = {name: count / read_tbs / 1e6 for name, count in parts.items()}
    return out | {"sum": sum(out.values())}


def tiny(data: Path) -> list[dict[str, Any]]:
    """The tiny checkpoint's block through every backend, bf16, against its expected float64 output."""
    from safetensors.torch import load_file

    rows = []
    for layer in (1, 2):
        expected = load_file(data / "expected" / f"layer_{layer}.safetensors")
        for backend in ("torch", "triton_unfused", "triton_fused"):
            for kernels in ("triton", "torch"):
                block = LatentMoE.from_checkpoint(
                    data, layer, max_tokens=64, device=DEVICE, backend=backend, kernels=kernels
                )
                hidden = expected["hidden"].to(DEVICE)
                rms = error_metrics(block(hidden), expected["block_out"]).rms
                row = {"layer": layer, "backend": backend, "kernels": kernels, "rms": rms}
                if backend != "torch":
                    block.capture([hidden.shape[0]])
                    row["graph_equal"] = torch.equal(block(hidden), block._run(hidden))
                rows.append(row | {"ok": rms <= TOLERANCE and row.get("graph_equal", True)})
    return rows


def variants(weights: BlockWeights, layers: dict[str, RoutedExperts]) -> dict[str, LatentMoE]:
    """The blocks that the backends at hand make: ours and parts of it for triton_fused, plain torch for all."""

    def block(backend: str, **options: Any) -> LatentMoE:
        return LatentMoE(CONFIG, weights, layers[backend], reduce=plain_sum, **options)

    out = {}
    if "triton_fused" in layers:
        out["block"] = block("triton_fused")
        out["block, one stream"] = block("triton_fused", overlap=False)
        out["block, torch.mm"] = block("triton_fused", linear=torch_linear)
    for name in layers:
        out[f"torch.mm + {name}"] = block(name, kernels="torch", linear=torch_linear, overlap=False)
    return out


def measure(name: str, block: LatentMoE, hidden: list[torch.Tensor]) -> dict[str, Any]:
    """Time by graph replay; the torch backend reads the routing on the host, so it is timed eagerly."""
    row: dict[str, Any] = {"block": name, "tokens": hidden[0].shape[0]}
    if name.endswith("+ torch"):
        row["us"], row["how"] = median_ms(lambda: block(hidden[0]), 3) * 1e3, "eager"
        return row | {"launches": launches(lambda: block(hidden[0]))}
    block.capture([hidden[0].shape[0]])
    graph = block.decode_graph(hidden[0].shape[0])
    block._graphs.clear()  # the calls below are to be captured, not replayed
    timing = time_graph(block, [(x,) for x in hidden])  # type: ignore[arg-type]
    return row | {
        "us": timing.us,
        "us_min": timing.us_min,
        "how": "graph",
        "bits_repeat": timing.repeats,
        "launches": launches(graph.replay),
        "host_us_eager": eager_us(block, (hidden[0],)),  # type: ignore[arg-type]
    }


def pieces(block: LatentMoE, hidden: list[torch.Tensor]) -> dict[str, float]:
    """µs of each step alone, by graph replay over the same inputs."""
    route = [block._route(x) for x in hidden]
    latent = [block._linear(x, block._down) for x in hidden]
    gate_up = [block._linear(x, block._gate_up) for x in hidden]
    h = [block._ops.activate(g, CONFIG.activation) for g in gate_up]
    steps: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
        "router": (lambda x: block._route(x)[1], [(x,) for x in hidden]),
        "router logits": (lambda x: partial_logits(x, block._router), [(x,) for x in hidden]),
        "down": (lambda x: block._linear(x, block._down), [(x,) for x in hidden]),
        "experts": (block.experts, [(x, *r) for x, r in zip(latent, route, strict=True)]),
        "norm": (lambda x: block._ops.norm(x, block._norm, 1e-5), [(x,) for x in latent]),
        "up": (lambda x, y: block._linear(x, block._up, y), list(zip(latent, hidden, strict=True))),
        "shared gate_up": (lambda x: block._linear(x, block._gate_up), [(x,) for x in hidden]),
        "shared situ": (lambda g: block._ops.activate(g, CONFIG.activation), [(g,) for g in gate_up]),
        "shared down": (lambda x: block._linear(x, block._shared_down), [(x,) for x in h]),
    }
    return {name: time_graph(call, sets).us for name, (call, sets) in steps.items()}  # type: ignore[arg-type]


@contextmanager
def recorded() -> Iterator[list[torch.Tensor]]:
    """Collect every tensor that torch hands out uninitialised, so that it can be poisoned before each replay."""
    kept: list[torch.Tensor] = []
    places = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in places]

    def wrap(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = original(*args, **kwargs)
            kept.append(tensor)
            return tensor

        return allocate

    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, wrap(original))
    try:
        yield kept
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def captured(action: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = action()
    return graph, result


def stress(block: LatentMoE, hidden: list[torch.Tensor], calls: int, *, chained: bool) -> dict[str, Any]:
    """Replay with every buffer filled with NaN before each graph, and count outputs that differ in a bit.

    chained:  one graph calls the block for all inputs in turn, so each call stands behind another's kernels, as in a
              model; otherwise each input has a graph of its own, whose first node is the call's first kernel
    """
    block.capture([hidden[0].shape[0]])  # compiles what a capture launches
    wanted = {id(x): block._run(x).clone() for x in hidden}
    bad = torch.zeros((), dtype=torch.int64, device=DEVICE)
    poisoned = 0
    rounds = []
    for inputs in [hidden] if chained else [[x] for x in hidden]:
        with recorded() as kept:
            graph, outputs = captured(lambda inputs=inputs: [block._run(x) for x in inputs])  # type: ignore[misc]
        buffers = [t for t in (block.experts._workspace, *kept, *outputs) if t.is_cuda and t.numel()]
        poisoned = sum(t.nbytes for t in buffers)

        def poison(buffers: list[torch.Tensor] = buffers) -> None:
            for tensor in buffers:
                tensor.view(-1).view(torch.uint8).fill_(0xFF)

        def check(inputs: list[torch.Tensor] = inputs, outputs: list[torch.Tensor] = outputs) -> None:
            for x, output in zip(inputs, outputs, strict=True):
                bad.add_((output.view(torch.int16) != wanted[id(x)].view(torch.int16)).any())

        rounds.append((captured(poison)[0], graph, captured(check)[0], kept))
    began = time.perf_counter()
    for _ in range(calls // len(hidden)):
        for fill, graph, compare, _ in rounds:
            fill.replay()
            graph.replay()
            compare.replay()
    torch.cuda.synchronize()
    return {
        "tokens": hidden[0].shape[0],
        "width": hidden[0].shape[1],
        "chained": chained,
        "calls": calls // len(hidden) * len(hidden),
        "wrong": int(bad),
        "poisoned_bytes": poisoned,
        "seconds": time.perf_counter() - began,
    }


def stress_tiny(data: Path, calls: int) -> list[dict[str, Any]]:
    """The tiny block, where launches follow each other fastest."""
    block = LatentMoE.from_checkpoint(data, 1, max_tokens=16, device=DEVICE, backend="triton_fused")
    width = block.config.hidden_size
    out = []
    for tokens in (1, 16):
        hidden = [torch.randn(tokens, width, device=DEVICE).bfloat16() for _ in range(4)]
        out += [stress(block, hidden, calls // 4, chained=chained) for chained in (False, True)]
    return out


def environment() -> dict[str, Any]:
    import triton

    return {
        "kind": "measured",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python {' '.join(sys.argv)}",
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sizes": f"D {D}, H {H}, shared {S}, {SPEC.num_local_experts} of {E} experts, top-16",
    }


def measure_all(args: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> bool:
    """Fill the report; what matters most comes first, so that a run that is cut short still says it."""
    limit = report["limits"] = limits(DEVICE)
    report["rows"], report["pieces"], report["floors"], report["stress"] = [], [], [], []
    experts = make_problem(SPEC, 1, device=DEVICE).weights
    tokens = [int(t) for t in args.tokens.split(",")]
    layers: dict[str, RoutedExperts] = {}
    ok = True
    for backends in (("triton_fused",), ("triton_unfused", "torch")):
        for name in backends:
            layers[name] = RoutedExperts(SPEC, experts, max_tokens=max(tokens), device=DEVICE, backend=name)
        for share in (1, 8):
            weights = make_weights(share=share)
            blocks = variants(weights, {name: layers[name] for name in backends})
            for count in tokens:
                ok &= measure_row(report, blocks, weights, experts, make_hidden(count, 4), share, limit["read_tbs"])
                save()
        if args.stress and "triton_fused" in backends:
            report["stress"] = stress_tiny(args.data, args.stress)
            for count in (1, max(tokens)):
                calls = args.stress // 10
                report["stress"].append(stress(blocks["block"], make_hidden(count, 4), calls, chained=True))
            print("stress", [(row["calls"], row["wrong"]) for row in report["stress"]], flush=True)
            ok &= not any(row["wrong"] for row in report["stress"])
            save()
    report["tiny"] = tiny(args.data)
    right = all(row["ok"] for row in report["tiny"])
    worst = max(row["rms"] for row in report["tiny"])
    print(f"tiny block, 3 backends: worst relative RMS {worst:.4f}, {'ok' if right else 'WRONG'}", flush=True)
    return ok and right


def measure_row(
    report: dict[str, Any],
    blocks: dict[str, LatentMoE],
    weights: BlockWeights,
    experts: Any,
    hidden: list[torch.Tensor],
    share: int,
    read_tbs: float,
) -> bool:
    """Measure all blocks for one number of tokens; returns whether all were right."""
    key = {"shared_ranks": share, "tokens": hidden[0].shape[0]}
    floor = floor_us(weights, hidden, read_tbs)
    truth, ok, line = reference(weights, experts, hidden[0]), True, []
    for name, block in blocks.items():
        if share > 1 and name.endswith("+ torch"):
            continue
        row = key | measure(name, block, hidden)
        row["rms"] = error_metrics(block(hidden[0]), truth).rms
        row["of_floor"] = row["us"] / floor["sum"]
        ok &= row["rms"] <= TOLERANCE and row.get("bits_repeat", True)
        report["rows"].append(row)
        line.append(f"{row['us']:.0f}[{row['launches']}]{'' if ok else ' WRONG'}")
    print(f"shared 1/{share} T {key['tokens']:2} floor {floor['sum']:4.0f}", *line, flush=True)
    if "block" in blocks:
        report["floors"].append(key | floor)
        report["pieces"].append(key | pieces(blocks["block"], hidden))
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="1,2,4,8,16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[1] / "tests/data/kimi-k3-tiny")
    parser.add_argument("--stress", type=int, default=0, help="calls of the tiny block, and a tenth of the real one")
    args = parser.parse_args()
    report: dict[str, Any] = environment()

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    report["ok"] = measure_all(args, report, save)
    save()
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
