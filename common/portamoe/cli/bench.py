"""`portamoe bench`: every accepted backend, and peers if given, timed on the same inputs in one run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.cli._report import FLOOR, Report, best_peer, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch

    from portamoe.cli._cases import Case, Inputs
    from portamoe.cli._implementations import Builder, Implementation
    from portamoe.device import Device
    from portamoe.spec import MoESpec
    from portamoe.weights import ExpertWeights

SCHEMA = 2
DEFAULT_TOKENS = "1,4,16,64,256,1024,4096,8192"
#: Tokens that are compared with the float32 reference.
CHECKED_TOKENS = 48
#: Calls whose host time is averaged, where the device is faster than this: a queue that is full would be timed too.
HOST_CALLS, HOST_US = 50, 1000.0
#: A slower call takes an implementation out of the rest of its layer.
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
    add(
        "--cases",
        default="k3-ep8,k3-tp8",
        help="comma list, in this order; append _skew or _one-sided, and @2+8 for tokens of its own; 'list' shows all",
    )
    add("--tokens", default=DEFAULT_TOKENS, help=f"comma list; default {DEFAULT_TOKENS}")
    add("--backend", action="append", metavar="NAME", help="time only these backends (repeatable)")
    add("--device", default="cuda:0", help="default cuda:0")
    add(
        "--peers",
        metavar="MODULE|FOLDER",
        help="module, or folder with peers.py, with PEERS: name -> build(weights, spec) -> callable(x, ids, weights)",
    )
    add("--peer", action="append", metavar="NAME", help="only these of the peers (repeatable)")
    add("--payload", metavar="FOLDER", help="handed to the peers' use_payload(FOLDER), if they have one")
    add("--json", metavar="FILE", help="write all numbers, after every row; default: nothing is written")
    add(
        "--plot",
        metavar="FILE",
        help="write a plot, SVG or PNG: time over tokens, share of the limit (needs portamoe[bench])",
    )
    add(
        "--compile",
        action="store_true",
        help="only compile what the run would need, peers included: fills caches ahead, beside other work",
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
    """Time, print the table, write what was asked for; status 1 if a backend was wrong or nothing was timed."""
    from portamoe.cli import _cases

    if args.cases == "list":
        sys.stdout.write("\n".join(_cases.names()) + "\n")
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
    with torch.cuda.device(device):
        return _bench(args, device)


def _bench(args: argparse.Namespace, device: torch.device) -> int:
    from portamoe.cli import _measure
    from portamoe.cli._implementations import load_peers
    from portamoe.detection import detect

    wanted = _wanted(args.cases, args.tokens)
    peers = load_peers(args.peers, args.payload) if args.peers else None
    run = _Run(args, device, detect().device(str(device)), peers)
    if not args.compile:
        run.report.about["limits"] = _measure.limits(device)
    for layer in dict.fromkeys(case.layer for case, _ in wanted):
        run.layer([(case, tokens) for case, tokens in wanted if case.layer == layer])
    if args.compile:
        sys.stdout.write("\n".join(f"{row['name']}: {row['failed']}" for row in run.report.rows) + "\n")
        return int(bool(run.report.rows))
    sys.stdout.write(table(run.report.to_dict()) + "\n")
    if args.plot:
        from portamoe.cli._plot import plot

        plot(run.report.to_dict(), Path(args.plot))
    return int(run.report.failed)


def _wanted(cases: str, tokens: str) -> list[tuple[Case, int]]:
    """Return the cells that were asked for, in order."""
    from portamoe.cli import _cases

    cells = []
    for text in cases.split(","):
        name, _, own = text.partition("@")
        case = _cases.case(name)
        cells += [(case, _count(count)) for count in (own.split("+") if own else tokens.split(","))]
    return list(dict.fromkeys(cells))


class _Run:
    """One run: what is timed where, and the report that grows."""

    def __init__(self, args: argparse.Namespace, device: torch.device, facts: Device, peers: ModuleType | None) -> None:
        self.args, self.device, self.facts, self.peers = args, device, facts, peers
        about = {"schema": SCHEMA, **_versions(device), "command": _command(args), "limits": {}}
        self.report = Report(about, Path(args.json) if args.json and not args.compile else None)

    def layer(self, wanted: Sequence[tuple[Case, int]]) -> None:
        """Build everything for one layer, time it cell by cell, and count launches last: a profiler slows the host."""
        import torch

        from portamoe.testing import make_weights

        first = wanted[0][0]
        spec, most = first.spec, max(tokens for _, tokens in wanted)
        weights, x_std = make_weights(spec, torch.Generator(device=self.device).manual_seed(0))
        ready = self._build(first.layer, self._builders(spec, weights, most))
        cells = [_Cell(case, tokens, x_std, self.device) for case, tokens in wanted]
        for cell in cells:
            began = time.perf_counter()
            if self.args.compile:
                self._compile(cell, ready)
            else:
                self._time(cell, weights, ready)
            _say(f"{cell.case.name} {cell.tokens}", began)
        if not self.args.compile:
            began = time.perf_counter()
            self._count_launches(cells, ready)
            _say(f"{first.layer} launches counted", began)
        del ready
        torch.cuda.empty_cache()

    def _builders(self, spec: MoESpec, weights: ExpertWeights, most: int) -> dict[str, Builder]:
        from portamoe.cli import _implementations as found

        wanted = self.args.backend or ()
        builders = found.backends(spec, weights, self.facts, self.device, most, wanted)
        if self.peers is not None:
            builders |= found.peers(self.peers, self.args.peer or (), spec, weights)
        return builders

    def _build(self, layer: str, builders: dict[str, Builder]) -> list[Implementation]:
        ready = []
        for name, build in builders.items():
            began = time.perf_counter()
            try:
                ready.append(build())
            except Exception as error:  # noqa: BLE001 - one broken implementation must not end the run
                self.report.add({"case": layer, "tokens": None, "name": name, "failed": _reason(error)})
            else:
                _say(f"{layer} {name} built", began)
        return ready

    def _compile(self, cell: _Cell, ready: Sequence[Implementation]) -> None:
        import torch

        for one in ready:
            try:
                one.call(*cell.sets()[0])
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - as above
                self.report.add({**cell.key, "name": one.name, "failed": _reason(error)})

    def _time(self, cell: _Cell, weights: ExpertWeights, ready: list[Implementation]) -> None:
        """Time one case at one number of tokens, all implementations in turn."""
        from portamoe.cli import _cases
        from portamoe.reference import moe_reference

        sets, spec = cell.sets(), cell.case.spec
        truth = moe_reference(spec, weights, *(t[:CHECKED_TOKENS] for t in sets[0]))
        floor = self.report.add({**cell.key, "name": FLOOR, **_cases.work(spec, sets, self.report.about["limits"])})
        rows = []
        for one in list(ready):
            row = self.report.add({**cell.key, "name": one.name, **one.facts(cell.tokens), **_row(one, sets, truth)})
            rows.append(row)
            if row.get("us", 0.0) > SLOWEST_US:
                ready.remove(one)
        best = best_peer(rows)
        for row in rows:
            if "us" in row:
                row["over_floor"] = round(row["us"] / floor["us"], 3)
                if best:
                    row["over_peer"] = round(row["us"] / best["us"], 3)
        self.report.write()

    def _count_launches(self, cells: Sequence[_Cell], ready: Sequence[Implementation]) -> None:
        from portamoe.cli import _measure

        for cell in cells:
            inputs = cell.sets()[0]
            for one in ready:
                row = next((r for r in self.report.rows if {**cell.key, "name": one.name}.items() <= r.items()), {})
                if "us" in row:
                    row["launches"] = _measure.launches(lambda one=one, inputs=inputs: one.call(*inputs))  # type: ignore[misc]
            self.report.write()


@dataclass(frozen=True)
class _Cell:
    """A case at one number of tokens."""

    case: Case
    tokens: int
    x_std: float
    device: torch.device

    @property
    def key(self) -> Json:
        """What its rows have in common."""
        return {"case": self.case.name, "tokens": self.tokens}

    def sets(self) -> list[Inputs]:
        """Draw its batches; the same at every call."""
        from portamoe.cli import _cases

        return _cases.make_inputs(self.case.spec, self.x_std, self.tokens, self.case.routing, self.device)


def _row(one: Implementation, sets: Sequence[Inputs], truth: torch.Tensor) -> Json:
    """Return times and errors; the error is the larger one of an eager call and of the graph's replay."""
    from portamoe.cli import _measure
    from portamoe.testing import error_metrics

    try:
        eager = error_metrics(one.call(*sets[0])[: truth.shape[0]], truth)
        timing = _measure.time_graph(one.call, sets)
        replayed = error_metrics(timing.first[: truth.shape[0]], truth)
        return {
            "us": round(timing.us, 2),
            "us_min": round(timing.us_min, 2),
            "rms": float(f"{max(eager.rms, replayed.rms):.3g}"),
            "max": float(f"{max(eager.max, replayed.max):.3g}"),
            "wrong": one.wrong(eager) or one.wrong(replayed) or not timing.finite,
            "repeats": timing.repeats,
            "eager_us": round(_measure.eager_us(one.call, sets[0], HOST_CALLS if timing.us < HOST_US else 5), 1),
            "peak_bytes": _measure.peak_bytes(lambda: one.call(*sets[0])),
        }
    except Exception as error:  # noqa: BLE001 - one broken implementation must not end the run
        return {"failed": _reason(error)}


def _say(what: str, began: float) -> None:
    sys.stderr.write(f"{what}: {time.perf_counter() - began:.1f} s\n")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


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


def _command(args: argparse.Namespace) -> str:
    parts = ["portamoe bench", "--gemm" if args.gemm else f"--cases {args.cases}", f"--tokens {args.tokens}"]
    parts += [f"--backend {name}" for name in args.backend or ()]
    parts += [flag for flag, given in (("--limits", args.limits), ("--tune", args.tune)) if given]
    parts += [f"--peers {Path(args.peers).name}"] if args.peers else []
    return " ".join(parts + [f"--peer {name}" for name in args.peer or ()])


def _versions(device: torch.device) -> Json:
    import torch

    import portamoe

    found: Json = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(device)}
    found |= {"portamoe": portamoe.__version__, "torch": torch.__version__, "label": "measured"}
    if "triton" in sys.modules or importlib.util.find_spec("triton"):
        found["triton"] = importlib.import_module("triton").__version__
    return found
