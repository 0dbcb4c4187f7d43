"""`probe --deep`: import vendor packages and run a tiny forward, each in a child process that may crash or hang.

The child is `python -m portamoe.deep`; it answers with one marked line on stdout.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portamoe.child import run_module
from portamoe.decision import Reason
from portamoe.spec import MoESpec

if TYPE_CHECKING:
    from portamoe.device import Device

MARK = "portamoe-deep:"
#: Sizes of the tiny problem; experts and tokens are few, so that reference and compilation dominate nothing.
HIDDEN, INTER, EXPERTS, TOP_K, TOKENS = 512, 512, 8, 4, 5


@dataclass(frozen=True)
class DeepResult:
    """What happened in the child: "ok", "failed", "crashed" or "timed out", and details in words."""

    status: str
    detail: str

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}"

    def reason(self, what: str) -> Reason | None:
        """Return the reason that a failure is, None for "ok"."""
        if self.status == "ok":
            return None
        remedy = "use another backend (PORTAMOE_BACKEND or backend=)"
        return Reason(what, str(self), "a forward close to the reference", remedy)


def try_import(module: str, timeout: float) -> DeepResult:
    """Import a vendor package in a child process."""
    return _run(["import", module], timeout)


def try_backend(name: str, spec: MoESpec, device: Device, timeout: float) -> DeepResult:
    """Run a small problem like `spec` through a backend in a child process and compare with the reference."""
    return _run(["backend", name, device.torch_name, json.dumps(spec.to_dict())], timeout)


def _run(arguments: Sequence[str], timeout: float) -> DeepResult:
    child = run_module("portamoe.deep", arguments, timeout)
    if child.code is None:
        return DeepResult("timed out", f"no answer within {timeout:g} s")
    answer = next((line.removeprefix(MARK) for line in reversed(child.lines) if line.startswith(MARK)), None)
    if answer is not None:
        return DeepResult(**json.loads(answer))
    how = f"signal {child.signal}" if child.signal else f"exit code {child.code} without an answer"
    return DeepResult("crashed", "; ".join([how, *child.last_words]))


def small_specs(spec: MoESpec) -> tuple[MoESpec, MoESpec]:
    """Return two small problems of the same formats and activation: a tiny one, and few experts of the full sizes."""
    experts = min(EXPERTS, spec.num_experts)
    few = replace(spec, num_experts=experts, top_k=min(TOP_K, spec.top_k, experts), local_experts=range(experts))
    return replace(few, hidden_size=HIDDEN, intermediate_size=INTER), few


def _compare(name: str, device: str, spec: MoESpec) -> str:
    """Run one problem and return its error in words; raises AssertionError for wrong numbers."""
    from portamoe import registry
    from portamoe.decision import Accepted
    from portamoe.detection import detect
    from portamoe.layer import RoutedExperts
    from portamoe.testing import assert_close, make_problem

    facts = detect().device(device)
    tiny, few = small_specs(spec)
    accepts = any(d.backend == name and isinstance(d, Accepted) for d in registry.decide(tiny, facts))
    small = tiny if accepts else few
    problem = make_problem(small, tokens=TOKENS)
    layer = RoutedExperts(small, problem.weights, device=device, backend=name, max_tokens=TOKENS)
    y = layer(*(t.to(layer.device) for t in (problem.x, problem.topk_ids, problem.topk_weights)))
    roundings = getattr(layer.backend, "roundings", 4)
    metrics = assert_close(y.cpu(), problem.reference(), roundings=roundings, context=name)
    return f"relative RMS {metrics.rms:.2g} at H {small.hidden_size}, I {small.intermediate_size}, T {TOKENS}"


def main(arguments: Sequence[str]) -> None:
    """Do in this process what `arguments` say and print the answer."""
    try:
        if arguments[0] == "import":
            version = getattr(importlib.import_module(arguments[1]), "__version__", None)
            result = DeepResult("ok", f"version {version}" if version else "imported")
        else:
            _, name, device, text = arguments
            result = DeepResult("ok", _compare(name, device, MoESpec.from_dict(_parsed(text))))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a vendor package may throw anything
        result = DeepResult("failed", f"{type(error).__name__}: {error}")
    sys.stdout.write(f"\n{MARK}{json.dumps(vars(result))}\n")


def _parsed(text: str) -> dict[str, Any]:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError(f"expected an object of MoESpec fields, got {text}")
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
