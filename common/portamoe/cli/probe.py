"""`portamoe probe`: what is there, and which backend serves a spec or why not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from portamoe.decision import Rejected
from portamoe.render import to_json, to_text

if TYPE_CHECKING:
    from portamoe.probe import Capabilities

EXIT_CODES = "exit codes: 0; 1 --backend or --require is rejected; 2 wrong usage; 3 detection itself failed"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `probe [capabilities]` and `probe record DIR`."""
    parser = subparsers.add_parser(
        "probe",
        help="devices, toolchain, and every backend's decision with its reasons",
        description="Show devices, toolchain, and every backend's decision with its reasons; or record them.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("action", nargs="?", choices=["capabilities", "record"], default="capabilities")
    parser.add_argument("directory", nargs="?", metavar="DIR", help="record: the new folder to write to")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--spec", default="kimi-k3", metavar="SPEC", help="kimi-k3, gpt-oss or a JSON file")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda:1, …; default: the first visible one")
    parser.add_argument("--backend", metavar="NAME", help="choose this one or say why not")
    parser.add_argument("--require", metavar="NAME", help="exit with 1 if this one is rejected")
    parser.add_argument("--deep", action="store_true", help="run each accepted backend in a child process")
    parser.add_argument("--root", metavar="DIR", help="replay a recording, without looking at this machine")


def execute(args: argparse.Namespace) -> int:
    """Print the report or write the recording; return the exit code."""
    if args.action == "record":
        return _record(args)
    if args.directory is not None:
        raise ValueError(f"unexpected argument {args.directory!r}; did you mean --root {args.directory}?")
    from portamoe.probe import capabilities
    from portamoe.spec import load_spec

    result = capabilities(
        load_spec(args.spec), device=args.device, backend=args.backend, root=args.root, deep=args.deep
    )
    rejected = _rejected(result, args)
    if args.json:
        text = to_json(result.to_dict())
    else:
        question = f"{args.spec} on {result.selection.device.torch_name}"
        text = to_text(result.to_dict(), question=question, why=result.selection.why)
    sys.stdout.write(text + "\n")
    return 1 if rejected else 0


def _rejected(result: Capabilities, args: argparse.Namespace) -> bool:
    names = [name for name in (args.backend, args.require) if name is not None]
    return any(isinstance(result.decision(name), Rejected) for name in names)


def _record(args: argparse.Namespace) -> int:
    from portamoe.detection import record

    if args.directory is None:
        raise ValueError("probe record needs the folder to write to: portamoe probe record DIR")
    record(Path(args.directory))
    sys.stdout.write(f"recorded to {args.directory}\n")
    return 0
