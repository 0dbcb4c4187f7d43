r"""Run first on a cluster: does the group work, are the results those of one process, and what does a call cost?

    torchrun --nproc-per-node=8 -m portamoe.distributed.selftest [--backend nccl] [--json FILE]
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT -m \
        portamoe.distributed.selftest

Exit codes: 0 all is well; 1 a result is wrong; 2 not started by torchrun, or an argument does not fit the machine;
3 a rank died or did not come, or the transport failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from portamoe.distributed._checks import CASES, Bench, Result
from portamoe.distributed.expert_parallel import Combine, ExpertParallel, Form
from portamoe.distributed.placement import split_experts
from portamoe.distributed.rank_group import RankGroup, StepRecord
from portamoe.distributed.watch import RankError
from portamoe.layer import RoutedExperts
from portamoe.spec import KIMI_K3, MoESpec
from portamoe.testing import make_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Environment that decides how ranks find and reach each other, as shown in the report.
_SHOWN = ("NCCL_", "RCCL_", "GLOO_", "FI_", "TORCH_NCCL_", "HIP_VISIBLE", "ROCR_VISIBLE", "CUDA_VISIBLE", "HSA_")
_STEPS = ("tokens", "counts", "dispatch", "experts", "combine", "sum")
_WARM_UP = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-test on this rank and return the exit code; rank 0 prints."""
    options = _parser().parse_args(arguments)
    if "RANK" not in os.environ:
        sys.stderr.write("start it with torchrun: torchrun --nproc-per-node=N -m portamoe.distributed.selftest" + "\n")
        return 2
    device = _device(options.device)
    if device is None or (options.backend == "nccl" and device.type == "cpu"):
        sys.stderr.write(f"--device {options.device} --backend {options.backend}: no such GPU for this rank" + "\n")
        return 2
    try:
        return _run(options, device)
    except RankError as error:
        sys.stderr.write(f"FAILED: {error}" + "\n")
        sys.stderr.flush()
        os._exit(3)  # collectives in flight with a dead rank would keep an orderly exit waiting


def _run(options: argparse.Namespace, device: torch.device) -> int:
    limit = timedelta(seconds=options.timeout)
    dist.init_process_group(options.backend, timeout=limit)
    ranks = RankGroup(None, device)
    report: dict[str, Any] = {"schema": 1, "environment": _environment(ranks)}
    _say(ranks, _environment_lines(report["environment"]))

    results = list(_checks(Bench(ranks, options.layer_backend), device))
    _say(ranks, [_result_line(result) for result in results])
    report["checks"] = [result._asdict() | {"passed": result.passed} for result in results]

    if options.tokens:
        report["timings"] = _timings(ranks, options)
        _say(ranks, _timing_lines(report["timings"]))
    failed = [result.name for result in results if not result.passed]
    _say(ranks, [f"{len(results) - len(failed)} of {len(results)} checks passed"])
    if options.json and ranks.rank == 0:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    ranks.close()
    dist.destroy_process_group()
    return 1 if failed else 0


def _checks(bench: Bench, device: torch.device) -> Iterator[Result]:
    yield from (bench.run(case) for case in CASES)
    sums: tuple[Combine, ...] = ("exact", "partial_sums")
    for combine in sums:
        if sliced := bench.run_slices(combine):
            yield sliced
    graph_safe = getattr(bench.layer.backend, "graph_safe", False)
    if device.type == "cuda" and not bench.ranks.staged and graph_safe:
        yield bench.run_captured()


def _timings(ranks: RankGroup, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every form and sum at several numbers of tokens a rank; the slowest rank counts."""
    spec = _timed_spec(options.spec, ranks.size)
    local = split_experts(spec.num_experts, ranks.rank, ranks.size)
    spec = replace(spec, local_experts=local)
    most = max(options.tokens)
    problem = make_problem(spec, most, seed=ranks.rank, device=ranks.device)
    layer = RoutedExperts(
        spec,
        problem.weights,
        max_tokens=max(ranks.size, min(most * ranks.size, options.max_tokens)),
        device=str(ranks.device),
        backend=options.layer_backend,
    )
    layer.warm_up()
    kinds: list[tuple[Form, Combine]] = [("all_to_all", "partial_sums"), ("all_gather", "partial_sums")]
    if layer.row_dtype is not None:
        kinds.append(("all_to_all", "exact"))
        kinds.append(("all_gather", "exact"))
    out = []
    for form, combine in kinds:
        parallel = ExpertParallel(layer, ranks, form=form, combine=combine)
        for tokens in options.tokens:
            inputs = (problem.x[:tokens], problem.topk_ids[:tokens], problem.topk_weights[:tokens])
            steps = _time(parallel, inputs, options.repeats)
            out.append({"form": form, "combine": combine, "tokens": tokens, "buffer_bytes": parallel.buffer_bytes})
            out[-1] |= {"layer": layer.backend.name, "steps": steps}
    return out


def _time(parallel: ExpertParallel, inputs: Sequence[torch.Tensor], repeats: int) -> dict[str, dict[str, float]]:
    """Return per step the median µs over the repeats on the slowest rank, and the bytes that the busiest rank sends."""
    ranks, calls = parallel.ranks, []
    for _ in range(repeats + _WARM_UP):
        ranks.records = []
        parallel(*inputs)
        calls.append(ranks.records)
    ranks.records = None
    mine = {name: _summary(calls[_WARM_UP:], name) for name in _STEPS}
    everyone = ranks.gather_objects(mine)
    return {
        name: {key: max(other[name][key] for other in everyone) for key in ("us", "sent_bytes")}
        for name in _STEPS
        if any(other[name]["us"] for other in everyone)
    }


def _summary(calls: Sequence[Sequence[StepRecord]], name: str) -> dict[str, float]:
    times = [sum(record.seconds for record in call if record.step == name) for call in calls]
    sent = max(sum(record.sent_bytes for record in call if record.step == name) for call in calls)
    return {"us": round(1e6 * statistics.median(times), 1), "sent_bytes": sent}


def _timed_spec(name: str, ranks: int) -> MoESpec:
    """Return the timed layer, on so many ranks."""
    if name == "tiny":
        return replace(KIMI_K3, hidden_size=512, intermediate_size=256, num_experts=max(32, ranks))
    if name == "kimi-k3-16":  # 16 experts a rank: 0.28 GB, made in seconds; GEMMs are shorter than those of 896
        return replace(KIMI_K3, num_experts=16 * ranks)
    return KIMI_K3


def _device(name: str) -> torch.device | None:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        return None
    # As many ranks as one likes may share a GPU with gloo; NCCL wants one each and says so itself.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
    torch.cuda.set_device(device)
    return device


def _environment(ranks: RankGroup) -> dict[str, Any]:
    device = ranks.device
    mine = {
        "rank": ranks.rank,
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch_device": str(device),
    }
    return {
        "torch": torch.__version__,
        "transport": ranks.backend + (" through host memory" if ranks.staged else ""),
        "timeout_s": ranks.timeout,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)},
        "ranks": ranks.gather_objects(mine),
    }


def _environment_lines(environment: dict[str, Any]) -> list[str]:
    lines = [f"torch {environment['torch']}, {environment['transport']}, time-out {environment['timeout_s']:g} s"]
    lines += [f"rank {r['rank']}: {r['host']}, {r['torch_device']} {r['device']}" for r in environment["ranks"]]
    return lines + [f"{name}={value}" for name, value in environment["variables"].items()]


def _result_line(result: Result) -> str:
    bits = "same bits" if result.bitwise else ("OTHER BITS" if result.promised else "other bits")
    verdict = "ok  " if result.passed else "FAIL"
    return f"{verdict} {result.name:58} {bits}, rms {result.rms:.1e} (limit {result.limit:g})"


def _timing_lines(timings: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["", f"{'form':11}{'sum':13}{'tokens':>7}" + "".join(f"{name:>11}" for name in _STEPS) + "   us; MB sent"]
    for row in timings:
        cells = "".join(f"{row['steps'].get(name, {}).get('us', 0):11.0f}" for name in _STEPS)
        sent = sum(step["sent_bytes"] for step in row["steps"].values()) / 1e6
        lines.append(f"{row['form']:11}{row['combine']:13}{row['tokens']:7}{cells}   {sent:.2f}")
    return lines


def _say(ranks: RankGroup, lines: Sequence[str]) -> None:
    if ranks.rank == 0:
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="portamoe.distributed.selftest", description=(__doc__ or "").split("\n\n", 1)[0]
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--backend", default="nccl" if gpu else "gloo", choices=("gloo", "nccl"), help="transport")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--layer-backend", default=None if gpu else "torch", help="of the layers; default: the best")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds until a missing rank is named")
    parser.add_argument(
        "--spec", default="tiny" if not gpu else "kimi-k3-16", choices=("tiny", "kimi-k3-16", "kimi-k3")
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 128], help="a rank, timed; none: checks only")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of the timed layer, of all ranks in a round")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="write the report there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
