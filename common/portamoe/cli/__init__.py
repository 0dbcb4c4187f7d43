"""The command line: `portamoe probe`, `portamoe run`, `portamoe verify`, `portamoe bench`.

Each command is a module of this package with `add_parser(subparsers)` and `execute(args) -> int` (the exit code).
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import portamoe
from portamoe.decision import BackendRejected
from portamoe.detection import DetectionError

#: Module names in this package; each is its command's name too.
COMMANDS = ("probe", "run", "verify", "bench")

OK, REJECTED, USAGE, DETECTION_FAILED = 0, 1, 2, 3
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

#: The first that fits an exception counts.
EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (DetectionError, DETECTION_FAILED),
    (BackendRejected, REJECTED),
    (ValueError, USAGE),
    (TypeError, USAGE),
    (OSError, 1),
)


class CliError(Exception):
    """Ends a command with one message on stderr and an exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one message on stderr."""
    parser = argparse.ArgumentParser(prog="portamoe", description=(portamoe.__doc__ or "").split("\n")[0])
    parser.add_argument("--version", action="version", version=f"portamoe {portamoe.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Only the command that is asked for is imported; the others are needed for the help text alone.
    names = arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS
    modules = {name: importlib.import_module(f"portamoe.cli.{name}") for name in names}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(arguments)
    if sys.stdout is None:  # closed by the caller (`>&-`): the exit code is all that is wanted
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path or variable may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        code: int = modules[args.command].execute(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away; without this Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except CliError as error:
        return _fail(str(error), error.code)
    except (DetectionError, BackendRejected, ValueError, TypeError, OSError) as error:
        # What a user can cause; anything else is a fault of this library and keeps its traceback.
        return _fail(str(error), next(code for kind, code in EXIT_CODES if isinstance(error, kind)))
    return code


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"portamoe: {message}\n")
    return code
