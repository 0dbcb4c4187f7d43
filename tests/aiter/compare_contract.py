"""Compare a real AITER with what the adapter and its stand-in assume. Run it, do not collect it:

    python tests/aiter/compare_contract.py /path/to/aiter-checkout         # reads files, needs torch only
    python tests/aiter/compare_contract.py --run cuda:0                    # the installed one, on a gfx950

The first form parses the source and runs its shuffle functions on the CPU, nothing else of it. The second calls the
real `fused_moe` and the stand-in with the same arguments and compares both. Exit 1 if anything differs.
"""

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Optional

import torch

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "common"), str(REPOSITORY)]

from rocm_moe.aiter.detect import detect_aiter  # noqa: E402
from rocm_moe.aiter.support import support  # noqa: E402
from tests.aiter import strict_moe, trees  # noqa: E402
from tests.aiter.test_strict_fake import CONTRACT, digest, drawn  # noqa: E402

E = 4
#: Of the problem that --run compares.
TOKENS = 9


class Report:
    """Prints one line a comparison and remembers whether any differed."""

    def __init__(self) -> None:
        self.differs = False

    def line(self, what: str, found: object, expected: object) -> None:
        """Compare `found` with `expected`."""
        same = found == expected
        self.differs |= not same
        if isinstance(found, dict) and isinstance(expected, dict):
            pairs = {
                k: (found.get(k, "absent"), expected.get(k, "absent")) for k in sorted(found.keys() | expected.keys())
            }
            other = (f"{k}: {mine}, assumed {theirs}" for k, (mine, theirs) in pairs.items() if mine != theirs)
            shown = "; ".join(other) or f"{len(found)} alike"
        else:
            shown = str(found) if same else f"{found}, assumed {expected}"
        self._print("same" if same else "DIFFERS", what, shown)

    def note(self, what: str, text: str) -> None:
        """Say something that is not judged."""
        self._print("note", what, text)

    def _print(self, verdict: str, what: str, text: object) -> None:
        sys.stdout.write(f"{verdict:<8} {what}: {text}\n")


def parameters(signature: str) -> dict[str, str]:
    """Return name -> default as source text; annotations change with the style of the day and count for nothing."""
    function = ast.parse(f"def f{signature}: ...").body[0]
    names = [a.arg for a in function.args.args]
    defaults = [ast.unparse(d) for d in function.args.defaults]
    return dict(zip(names, ["<required>"] * (len(names) - len(defaults)) + defaults, strict=True))


def source_of(path: Path, name: str) -> str | None:
    """Return the source of one top-level function, without decorators."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if node is None:
        return None
    node.decorator_list = []
    return ast.unparse(node)


def compare_signatures(root: Path, version: str | None, report: Report) -> None:
    """Compare fused_moe and situv2 with the record of that version, or the newest where it is unknown."""
    tag = trees.tag_of(version) if version else "main"
    for name in ("fused_moe", "situv2"):
        source = source_of(root / "fused_moe.py", name)
        found = None if source is None else parameters(f"({source.split('(', 1)[1].split('):')[0].split(') ->')[0]})")
        record = trees.record(name, tag)
        report.line(f"{name}'s parameters at {tag}", found, None if record is None else parameters(record))


def compare_enums(root: Path, version: str | None, report: Report) -> None:
    """Compare the values of ActivationType and QuantType, and the names of the gate modes."""
    headers = [root.parent / p / "csrc/include/aiter_enum.h" for p in ("aiter_meta", ".")]
    header = next((h for h in headers if h.is_file()), None)
    if header is None:
        report.note("enums", "no aiter_enum.h beside the package")
        return
    text = re.sub(r"//[^\n]*", "", header.read_text(encoding="utf-8"))
    expected = {"ActivationType": CONTRACT["enums"]["ActivationType"], "QuantType": CONTRACT["enums"]["QuantType"]}
    if not version or not version.startswith(("0.1.16", "0.1.17", "0.1.18")):
        expected["ActivationType"] = {**expected["ActivationType"], **CONTRACT["enums"]["ActivationType since v0.1.19"]}
    for name, members in expected.items():
        body = re.search(rf"enum class {name}[^{{]*{{([^}}]*)}}", text)
        found, value = {}, -1
        for item in filter(None, (part.strip() for part in (body[1] if body else "").split(","))):
            key, _, number = (part.strip() for part in item.partition("="))
            value = int(number) if number else value + 1
            found[key] = value
        report.line(name, {k: v for k, v in found.items() if k in members}, members)
    modes = (root / "ops/flydsl/moe_common.py").read_text(encoding="utf-8") if (root / "ops/flydsl").is_dir() else ""
    for name, value in CONTRACT["enums"]["GateMode"].items():
        report.line(f"GateMode.{name}", bool(re.search(rf"{name}\s*=\s*['\"]{value}['\"]", modes)), True)


def compare_environment(root: Path, report: Report) -> None:
    """Every variable that the adapter sets or refuses is read somewhere in the MoE code."""
    text = (root / "fused_moe.py").read_text(encoding="utf-8")
    for name in (*support().mode_variables, *support().refused_variables):
        report.line(f"fused_moe.py reads {name}", name in text, True)


def compare_shuffles(root: Path, report: Report) -> None:
    """Run the package's own shuffles on the seeded bytes and compare the recorded hashes."""
    data = drawn()
    shuffle = root / "ops/shuffle.py"
    if not shuffle.is_file():
        report.line("ops/shuffle.py", None, "a file")
        return
    tree = ast.parse(shuffle.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions = {"torch": torch, "get_gfx": lambda: "gfx950", "Optional": Optional}
    exec(compile(tree, str(shuffle), "exec"), functions)  # noqa: S102 - the user asked for this checkout
    for key, expected in CONTRACT["hashes"].items():
        source, *layout = key.split()
        interleaved = layout == ["interleaved"]
        if source.startswith("w"):
            view = data[source].view(torch.float4_e2m1fn_x2)
            out = functions["shuffle_weight_a16w4"](view, 16, interleaved)
        else:
            view = data[source].view(torch.float8_e8m0fnu).flatten(0, 1)
            out = functions["shuffle_scale_a16w4"](view, E, interleaved)
        report.line(f"shuffled {key}", digest(out), expected)


def compare_run(device: str, report: Report) -> None:
    """Call the installed `fused_moe` and the stand-in with the same arguments."""
    from portamoe.activations import SiTU
    from portamoe.spec import MoESpec
    from portamoe.testing import error_metrics, make_problem, tolerance
    from rocm_moe.aiter import call
    from rocm_moe.aiter.backend import BACKEND

    facts = detect_aiter() or {}
    release = tuple(int(part) for part in re.findall(r"\d+", facts.get("version") or "0.1.20")[:3])
    for name, mode in support().modes.items():
        spec = MoESpec(
            hidden_size=256,
            intermediate_size=384,
            num_experts=16,
            top_k=4,
            activation=SiTU(4.0, 25.0),
            activation_format=mode.activation_format,
        )
        problem = make_problem(spec, TOKENS)
        prepared = BACKEND.prepare(problem.weights, spec, torch.device(device))
        tensors = [t.to(device) for t in (problem.x, problem.topk_ids, problem.topk_weights)]
        out = torch.empty_like(tensors[0])
        workspace = torch.empty(BACKEND.workspace_bytes(spec, TOKENS, TOKENS * 4), dtype=torch.uint8, device=device)
        BACKEND.forward(prepared, *tensors, workspace, out, max_local_rows=TOKENS * 4)
        handle = call.AiterHandle(_stand_in(release), prepared.handle.situv2, prepared.handle.per_1x32)
        on_cpu = BACKEND.prepare(problem.weights, spec, torch.device("cpu"))
        fake = type(on_cpu)(**{**vars(on_cpu), "handle": handle})
        expected = torch.empty_like(problem.x)
        arguments = (problem.x, problem.topk_ids, problem.topk_weights, workspace.cpu(), expected)
        BACKEND.forward(fake, *arguments, max_local_rows=TOKENS * 4)
        for other, truth in (("stand-in", expected.float()), ("reference", problem.reference())):
            metrics = error_metrics(out.cpu(), truth)
            report.line(f"{name} against the {other} ({metrics})", metrics.rms <= tolerance(4).rms, True)


def _stand_in(release: tuple[int, ...]):
    names = list(parameters(trees.record("fused_moe", "main")))

    def fused_moe(*args: object, **kwargs: object) -> torch.Tensor:
        call = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
        return strict_moe.fused_moe(call, release)

    return fused_moe


def main() -> int:
    """Compare what the command line names; 0 when everything is as assumed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="checkout or site-packages; default: the installed one")
    parser.add_argument("--version", help="AITER's version, where the files do not say")
    parser.add_argument("--run", metavar="DEVICE", help="also call it, on this device")
    options = parser.parse_args()
    facts = detect_aiter([str(options.path)] if options.path else None)
    if facts is None or not facts["is_amd"] or "problem" in facts:
        sys.stdout.write(f"not a usable AITER: {facts}\n")
        return 1
    root, report = Path(facts["root"]), Report()
    version = options.version or facts["version"]
    report.note("version", str(version))
    compare_signatures(root, version, report)
    compare_enums(root, version, report)
    compare_environment(root, report)
    compare_shuffles(root, report)
    if options.run:
        compare_run(options.run, report)
    return int(report.differs)


if __name__ == "__main__":
    sys.exit(main())
