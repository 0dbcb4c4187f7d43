"""`portamoe bench`: every accepted backend, and peers if given, timed on the same inputs in one run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.testing import Problem

SCHEMA = 1
#: Relative RMS error up to which a peer counts as right; backends are held to the tolerance table.
PEER_TOLERANCE = 0.01
DEFAULT_TOKENS = "1,4,16,64,256,1024,4096,8192"
#: Seconds after which a row of a slow backend ends its case.
SLOWEST_US = 1e6

Json = dict[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="time every accepted backend on this machine's GPU, beside the floor and the peers",
        description="GPU-graph replay over rotating inputs, medians; each result is compared with the float32 "
        "reference. The device's limits are measured in the same run.",
    )
    add = parser.add_argument
    add("--cases", default="k3-ep8,k3-tp8", help="comma list; append _skew for skewed routing; 'list' shows all")
    add("--tokens", default=DEFAULT_TOKENS, help=f"comma list; default {DEFAULT_TOKENS}")
    add("--backend", action="append", metavar="NAME", help="time only these backends (repeatable)")
    add("--device", default="cuda:0", help="default cuda:0")
    add(
        "--peers", metavar="MODULE", help="module with PEERS: name -> build(weights, spec) -> callable(x, ids, weights)"
    )
    add("--peer", action="append", metavar="NAME", help="only these of the peers (repeatable)")
    add("--payload", metavar="DIR", help="handed to the module's use_payload(DIR), if it has one")
    add("--json", metavar="FILE", help="write all numbers; default: nothing is written")
    add(
        "--plot",
        metavar="FILE",
        help="write a plot, SVG or PNG: time over tokens, share of the limit (needs portamoe[bench])",
    )
    add(
        "--limits",
        action="store_true",
        help="measure what the clock model of a backend assumes (default triton_unfused) and re-evaluate its cells",
    )
    add(
        "--tune",
        action="store_true",
        help="measure a backend's tiles (default triton_unfused) and write them to $PORTAMOE_TUNED_DIR",
    )
    add("--gemm", action="store_true", help="time projections of 1 to 16 rows instead; with --tune, make their plan")
    add("--shapes", metavar="NxK,...", help="with --gemm: these instead of the plan's")
    add("--spec", default="kimi-k3", help="with --limits or --tune: a preset or a JSON file of MoESpec fields")


def execute(args: argparse.Namespace) -> int:
    """Time, print the table, write what was asked for; status 1 if a result was wrong or nothing was timed."""
    from portamoe.cli import _measure
    from portamoe.detection import detect

    if args.cases == "list":
        sys.stdout.write("\n".join(_measure.CASES) + "\n")
        return 0
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "portamoe bench times a GPU, and torch sees none; `portamoe verify` checks numbers without one"
        )
    device = torch.device(args.device)
    if args.gemm:
        from portamoe.cli import gemm

        return gemm.execute(args, device, {**_versions(device), "command": _command(args)})
    if args.limits or args.tune:
        return _evidence(args, device)
    tokens = [_count(text) for text in args.tokens.split(",")]
    facts = detect().device(str(device))
    with torch.cuda.device(device):
        limits = _measure.limits(device)
        rows: list[Json] = []
        for name in args.cases.split(","):
            spec, routing = _case(name)
            rows += _run_case(name, spec, routing, tokens, facts, device, limits, args)
    report = {"schema": SCHEMA, **_versions(device), "command": _command(args), "limits": limits, "rows": rows}
    sys.stdout.write(table(report) + "\n")
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from portamoe.cli._plot import plot

        plot(report, Path(args.plot))
    return int(not rows or any(row.get("wrong") for row in rows))


def _evidence(args: argparse.Namespace, device: torch.device) -> int:
    """Run a backend's own measurements: `measure_limits(spec, device)`, `tune(spec, device)`."""
    from portamoe import registry
    from portamoe.spec import load_spec

    spec = load_spec(args.spec)
    names = args.backend or ["triton_unfused"]
    reports: Json = {**_versions(device), "command": _command(args), "spec": spec.to_dict()}
    for name in names:
        backend = registry.named(name)
        if backend is None:
            raise ValueError(f"unknown backend {name!r}; known: {', '.join(b.name for b in registry.backends())}")
        for wanted, method in ((args.limits, "measure_limits"), (args.tune, "tune")):
            if not wanted:
                continue
            measure = getattr(backend, method, None)
            if measure is None:
                raise ValueError(f"{name} measures no {'limits' if method == 'measure_limits' else 'tiles'}")
            report = measure(spec, device)
            sys.stdout.write("\n".join([f"{name}: {method}", *report.lines()]) + "\n")
            reports[f"{name}.{method}"] = report.to_dict()
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--tokens takes positive numbers, got {text!r}")
    return int(text)


def _case(name: str) -> tuple[MoESpec, str]:
    from portamoe.cli._measure import CASES

    base = name.removesuffix("_skew")
    if base not in CASES:
        raise ValueError(f"unknown case {name!r}; known: {', '.join(CASES)}, each also with _skew")
    return CASES[base], "skew" if base != name else "uniform"


def _command(args: argparse.Namespace) -> str:
    asked = "--gemm" if args.gemm else f"--cases {args.cases}"
    parts = ["portamoe bench", asked, f"--tokens {args.tokens}"]
    parts += [f"--backend {name}" for name in args.backend or ()]
    parts += [flag for flag, given in (("--limits", args.limits), ("--tune", args.tune)) if given]
    return " ".join(parts + ([f"--peers {args.peers}"] if args.peers else []))


def _versions(device: torch.device) -> Json:
    import torch

    import portamoe

    found: Json = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(device)}
    found |= {"portamoe": portamoe.__version__, "torch": torch.__version__, "label": "measured"}
    if "triton" in sys.modules or importlib.util.find_spec("triton"):
        found["triton"] = importlib.import_module("triton").__version__
    return found


def _run_case(
    name: str,
    spec: MoESpec,
    routing: str,
    tokens: Sequence[int],
    facts: Device,
    device: torch.device,
    limits: dict[str, float],
    args: argparse.Namespace,
) -> list[Json]:
    """Time every implementation on one case; one is built, timed and freed before the next."""
    import torch

    from portamoe.cli import _measure
    from portamoe.reference import moe_reference
    from portamoe.testing import make_problem

    problem = make_problem(spec, max(tokens), device=device, routing=routing)  # type: ignore[arg-type]
    batches, truths = {}, {}
    rows: list[Json] = []
    for count in tokens:
        part = _first(problem, count)
        batches[count] = _measure.make_inputs(part, spec, count, routing)
        checked = min(count, _measure.CHECKED_TOKENS)
        x, ids, weights = (t[:checked] for t in batches[count][0])
        truths[count] = moe_reference(spec, problem.weights, x, ids, weights)
        floor, bound = _measure.floor_us(spec, batches[count], limits)
        rows.append({"case": name, "tokens": count, "name": "floor", "us": floor, "bound": bound})
    for label, build in _implementations(problem, spec, facts, device, max(tokens), args):
        try:
            call, extra = build()
        except Exception as error:  # noqa: BLE001 - one broken implementation must not end the run
            rows.append(
                {"case": name, "tokens": None, "name": label, "failed": f"{type(error).__name__}: {error}"[:300]}
            )
            continue
        for count in tokens:
            rows.append(
                {
                    "case": name,
                    "tokens": count,
                    "name": label,
                    **extra(count),
                    **_row(call, batches[count], truths[count]),
                }
            )
            if float(rows[-1].get("us") or 0) > SLOWEST_US:
                break
        del call, build
        torch.cuda.empty_cache()
    return rows


def _first(problem: Problem, tokens: int) -> Problem:
    x, ids, weights = (t[:tokens].contiguous() for t in (problem.x, problem.topk_ids, problem.topk_weights))
    return replace(problem, x=x, topk_ids=ids, topk_weights=weights)


def _row(call: Callable[..., torch.Tensor], sets: Sequence[Any], truth: torch.Tensor) -> Json:
    from portamoe.cli import _measure
    from portamoe.testing import error_metrics

    try:
        error = error_metrics(call(*sets[0])[: truth.shape[0]], truth)
        timing = _measure.time_graph(call, sets)
        return {
            "us": round(timing.us, 2),
            "us_min": round(timing.us_min, 2),
            "rms": float(f"{error.rms:.3g}"),
            "wrong": not error.rms <= PEER_TOLERANCE or not error.max <= 0.025,
            "repeats": timing.repeats,
            "launches": _measure.launches(lambda: call(*sets[0])),
            "eager_us": round(_measure.eager_us(call, sets[0]), 1),
        }
    except Exception as error:  # noqa: BLE001 - as above: the reason is reported
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def _implementations(
    problem: Problem, spec: MoESpec, facts: Device, device: torch.device, most: int, args: argparse.Namespace
) -> list[tuple[str, Callable[[], tuple[Callable[..., torch.Tensor], Callable[[int], Json]]]]]:
    """Return name and builder of every accepted backend and of the peers."""
    from portamoe import registry
    from portamoe.decision import Accepted

    found = []
    for decision in registry.decide(spec, facts):
        wanted = decision.backend in args.backend if args.backend else isinstance(decision, Accepted)
        if wanted:
            found.append((decision.backend, _backend_builder(decision.backend, problem, spec, facts, device, most)))
    if args.peers:
        module = importlib.import_module(args.peers)
        if args.payload and hasattr(module, "use_payload"):
            module.use_payload(args.payload)
        for name, build in module.PEERS.items():
            if not args.peer or name in args.peer:
                found.append((f"peer:{name}", _peer_builder(build, problem, spec)))
    return found


def _backend_builder(
    name: str, problem: Problem, spec: MoESpec, facts: Device, device: torch.device, most: int
) -> Callable[[], tuple[Callable[..., torch.Tensor], Callable[[int], Json]]]:
    def build() -> tuple[Callable[..., torch.Tensor], Callable[[int], Json]]:
        import torch

        from portamoe import registry

        backend = registry.select(spec, facts, name)
        prepared = backend.prepare(problem.weights, spec, device)
        rows = backend.default_max_local_rows(spec, most)
        workspace = torch.empty(backend.workspace_bytes(spec, most, rows), dtype=torch.uint8, device=device)
        backend.warm_up(prepared, most, rows)

        def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            backend.forward(prepared, x, ids, weights, workspace, out, max_local_rows=rows)
            return out

        def extra(tokens: int) -> Json:
            return {"workspace": backend.workspace_bytes(spec, tokens, backend.default_max_local_rows(spec, tokens))}

        return call, extra

    return build


def _peer_builder(
    build: Callable[..., Any], problem: Problem, spec: MoESpec
) -> Callable[[], tuple[Callable[..., torch.Tensor], Callable[[int], Json]]]:
    def built() -> tuple[Callable[..., torch.Tensor], Callable[[int], Json]]:
        return build(problem.weights, spec), lambda _: {}

    return built


def table(report: Json) -> str:
    """Return the table: a line per case and number of tokens, µs and the ratio to the floor per implementation."""
    rows = [row for row in report["rows"] if row["tokens"] is not None]
    names = list(dict.fromkeys(row["name"] for row in rows if row["name"] != "floor"))
    by_key = {(row["case"], row["tokens"], row["name"]): row for row in rows}
    lines = [["case", "tokens", "floor", *names]]
    for case, tokens in dict.fromkeys((row["case"], row["tokens"]) for row in rows):
        floor = by_key[case, tokens, "floor"]["us"]
        lines.append([case, str(tokens), f"{floor:.1f}", *(_cell(by_key.get((case, tokens, n)), floor) for n in names)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    failed = [
        f"{row['name']} {row['case']} {row['tokens'] or ''}: {row['failed']}"
        for row in report["rows"]
        if "failed" in row
    ]
    head = f"{report['device']}, torch {report['torch']}, {report['date']}: " + ", ".join(
        f"{name} {value:.4g}" for name, value in report["limits"].items()
    )
    return os.linesep.join([head, text, *failed])


def _cell(row: Json | None, floor: float) -> str:
    if row is None or "us" not in row:
        return "-" if row is None else "failed"
    return f"{row['us']:.1f} x{row['us'] / floor:.2f}" + (" WRONG" if row["wrong"] else "")
