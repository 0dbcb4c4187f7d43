"""`portamoe verify`: the acceptance set on the machine at hand, and a bundle of it for a maintainer."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.acceptance.pool import Pool, default_jobs
from portamoe.acceptance.shares import GROUPS
from portamoe.decision import Accepted, BackendRejected, Decision, Rejected
from portamoe.whole_files import written_beside

if TYPE_CHECKING:
    from portamoe.device import Device
    from portamoe.spec import MoESpec

EXIT_CODES = "exit codes: 0 all passed; 1 a check failed, nothing was checked or --backend is rejected; 2 wrong usage"
#: Of the JSON form; grows when a key changes its meaning or goes away.
SCHEMA = 1
#: Seconds that one child may take; a first run compiles for minutes.
_TIMEOUT = 3600.0
#: Seconds between two writes of what was found so far.
_WRITE_EVERY = 1.0

Json = dict[str, Any]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `verify`."""
    parser = subparsers.add_parser(
        "verify",
        help="check every backend's numbers on this machine: activations, shapes, routing, repeatability, graphs",
        description="Run the acceptance set on every backend that accepts the spec, in child processes. "
        "What cannot be run says why and does not count as passed.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--backend", metavar="NAME", help="check only this one, or say why it is rejected")
    parser.add_argument("--spec", default="kimi-k3", metavar="SPEC", help="kimi-k3, gpt-oss or a JSON file")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda:1, …; default: the first visible one")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="fewer numbers of tokens, no timings")
    parser.add_argument("--bundle", metavar="FILE", help="write probe record, verdicts, results and timings as a zip")
    parser.add_argument("--results", metavar="FILE", help="write the JSON object there too, and keep it up to date")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="child processes at once; default: as cores and memory allow, 1 on a CPU"
    )
    parser.add_argument(
        "--timeout", type=float, default=_TIMEOUT, metavar="S", help=f"seconds a child process may take ({_TIMEOUT:g})"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the checks, print table or JSON, write the bundle; return the exit code."""
    from portamoe import bundle
    from portamoe.spec import load_spec

    target = bundle.checked_target(args.bundle) if args.bundle else None
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs}, expected at least 1")
    results = None if args.results is None else Path(args.results)
    if results is not None:
        _write(results, {})  # a long run must not end in an error
    report = verify(
        load_spec(args.spec),
        device=args.device,
        backend=args.backend,
        quick=args.quick,
        timeout=args.timeout,
        jobs=args.jobs,
        name=args.spec,
        tell=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
        so_far=None if results is None else lambda report: _write(results, report),
    )
    if target is not None:
        bundle.write(target, report)
    text = json.dumps(report, indent=2) if args.json else to_text(report)
    sys.stdout.write(text + "\n")
    if target is not None and not args.json:
        sys.stdout.write(f"bundle    {target}\n")
    return 0 if report["passed"] else 1


def _write(path: Path, report: Json) -> None:
    with written_beside(path) as beside:
        beside.write_text(json.dumps(report, indent=1), encoding="utf-8")


def verify(
    spec: MoESpec,
    *,
    device: str | None = None,
    backend: str | None = None,
    quick: bool = False,
    timeout: float = _TIMEOUT,
    jobs: int | None = None,
    name: str = "",
    tell: Callable[[str], None] = lambda _: None,
    so_far: Callable[[Json], None] | None = None,
) -> Json:
    """Run the acceptance set and return the report.

    spec:     what the backends are asked to serve
    device:   as torch names it; default: the first visible one
    backend:  only this one; BackendRejected where it is, ValueError where none has that name
    quick:    fewer numbers of tokens and no timings
    timeout:  seconds that a child process may take
    jobs:     child processes at once; default: as cores and memory allow
    name:     what the report calls the spec
    tell:     is called with a line of text whenever a part is done
    so_far:   is called with the report of what was found until then, about once a second

    SIGTERM and SIGINT end the children; the report then holds what was found and is not `complete`.
    """
    from portamoe import dispatch, registry
    from portamoe.detection import detect

    found = detect()
    where = found.devices[0] if device is None else found.device(device)
    # A verdict that failed before is checked again, so only what the backends themselves say counts here.
    decisions = tuple(dispatch.without_verdict(d, spec, where) for d in registry.decide(spec, where))
    if backend is not None:
        selection = registry.choose(spec, where, backend, decisions)
        if selection.name is None:
            raise BackendRejected(f"on {where.torch_name} ({where.arch}), {selection.why}", decisions)
        decisions = tuple(d for d in decisions if d.backend == backend)
    skipped: list[Json] = []
    for decision in decisions:
        if reasons := _left_out(decision, where, named=backend is not None):
            skipped.append({"backend": decision.backend, "package": decision.package, "reasons": reasons})
    out = {entry["backend"] for entry in skipped}
    checked = [decision.backend for decision in decisions if decision.backend not in out]
    head = {
        "schema": SCHEMA,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "spec_name": name,
        "spec": spec.to_dict(),
        "device": _device(where),
        "quick": quick,
    }
    pool = Pool(jobs=default_jobs(where) if jobs is None else jobs, timeout=timeout, tell=tell)

    def report(*, complete: bool) -> Json:
        checks = pool.checks(checked)
        return head | _counted(checks, complete) | {"checks": checks, "left_out": skipped}

    complete = False
    try:
        with _signals(), _regularly(so_far, lambda: report(complete=False)):
            pool.run(checked, spec, where, quick=quick)
        complete = True
    except (_Cut, KeyboardInterrupt) as cut:
        tell(f"ended early by {type(cut).__name__ if not cut.args else cut}: the report holds what was found")
    final = report(complete=complete)
    if so_far is not None:
        so_far(final)
    return final


def _counted(checks: Sequence[Json], complete: bool) -> Json:
    counts = Counter(check["status"] for check in checks)
    return {
        "complete": complete,
        "passed": complete and bool(counts["passed"]) and not counts["failed"],
        "counts": {status: counts[status] for status in ("passed", "failed", "not run")},
    }


class _Cut(Exception):
    """The process is asked to end."""


@contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGTERM into an exception: batch systems and `timeout` send it some seconds before they kill."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def cut(number: int, frame: object) -> None:  # noqa: ARG001
        raise _Cut(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, cut)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _regularly(so_far: Callable[[Json], None] | None, report: Callable[[], Json]) -> Iterator[None]:
    """Hand over the report about once a second while the block runs."""
    if so_far is None:
        yield
        return
    over = threading.Event()

    def work() -> None:
        while not over.wait(_WRITE_EVERY):
            so_far(report())

    writer = threading.Thread(target=work, daemon=True)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def _device(device: Device) -> Json:
    names = ("vendor", "arch", "index", "name", "memory_bytes", "uuid", "compute_units")
    return {name: getattr(device, name) for name in names} | {"torch_name": device.torch_name}


def _left_out(decision: Decision, device: Device, *, named: bool) -> list[Json]:
    if isinstance(decision, Rejected):
        return [reason.to_dict() for reason in decision.reasons]
    # On a GPU the slower variants are checked as well; Triton's interpreter on a CPU would take hours.
    asked = isinstance(decision, Accepted) and decision.only_on_request
    return [asked.to_dict()] if asked and not named and device.vendor == "cpu" else []


def to_text(report: Json) -> str:
    """Return the report as text: a table, then what failed, what was not run and what was left out."""
    device, checks = report["device"], report["checks"]
    lines = [
        f"device    {device['torch_name']} ({device['arch']}, {device['name']})",
        f"spec      {report['spec_name'] or report['spec']}",
        *_table(checks),
        *_section("timings (measured)", [c for c in checks if c["group"] == "timing" and c["status"] == "passed"]),
        *_section("failed", [c for c in checks if c["status"] == "failed"]),
        *_section("not run", [c for c in checks if c["status"] == "not run"]),
    ]
    if report["left_out"]:
        lines.append("left out")
        for entry in report["left_out"]:
            lines += [f"  {entry['backend']} ({entry['package']}): {_reason(reason)}" for reason in entry["reasons"]]
    counts = ", ".join(f"{count} {status}" for status, count in report["counts"].items())
    state = "passed" if report["passed"] else "FAILED" if report["complete"] else "CUT   "
    lines.append(f"{state}    {counts}")
    return "\n".join(lines)


def _reason(reason: Json) -> str:
    from portamoe.render import reason_line

    return reason_line(reason)


def _table(checks: Sequence[Json]) -> list[str]:
    lines = [
        f"{'backend':<22} {'check':<11} {'passed':>6} {'failed':>6} {'not run':>7} {'worst RMS':>9} {'seconds':>8}"
    ]
    for backend in dict.fromkeys(check["backend"] for check in checks):
        for group in GROUPS:
            mine = [c for c in checks if c["backend"] == backend and c["group"] == group]
            if not mine:
                continue
            counts = Counter(c["status"] for c in mine)
            errors = [c["figures"]["rms"] for c in mine if "rms" in c["figures"]]
            worst = f"{max(errors):.2g}" if errors else "-"
            lines.append(
                f"{backend:<22} {group:<11} {counts['passed']:>6} {counts['failed']:>6} {counts['not run']:>7} "
                f"{worst:>9} {sum(c['seconds'] - c['figures'].get('waited_s', 0.0) for c in mine):>8.1f}"
            )
    return lines


def _section(title: str, checks: Sequence[Json]) -> list[str]:
    """Return a titled list; cases of one group with one text are one line."""
    if not checks:
        return []
    together: dict[tuple[str, str, str], list[str]] = {}
    for check in checks:
        together.setdefault((check["backend"], check["group"], check["detail"]), []).append(check["case"])
    return [title, *(f"  {b} {g} {', '.join(cases)}: {detail}" for (b, g, detail), cases in together.items())]
