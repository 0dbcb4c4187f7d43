"""Run cases of the fused backend through Triton's interpreter and print one JSON line per case.

A process of its own: TRITON_INTERPRET counts when a kernel's module is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import interpreter

interpreter.patch()

import torch  # noqa: E402

from cuda_moe import plan, triton_compat  # noqa: E402
from cuda_moe import prepared as prepared_module  # noqa: E402
from cuda_moe.plan import tuned  # noqa: E402
from cuda_moe.triton_fused import BACKEND, BATCH_INVARIANT  # noqa: E402
from portamoe.activations import GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep  # noqa: E402
from portamoe.spec import MoESpec  # noqa: E402
from portamoe.testing import error_metrics, make_problem  # noqa: E402

SMALL = MoESpec(hidden_size=64, intermediate_size=32, num_experts=6, top_k=2, activation=SiTU(4.0, 25.0))
OAI = SwiGLUOAI(alpha=1.702, limit=7.0)


def run(problem, backend=BACKEND, rows=None, tokens=None):
    """Return the backend's output with a poisoned workspace of exactly the announced size."""
    spec = problem.spec
    tokens = problem.x.shape[0] if tokens is None else tokens
    weights = backend.prepare(problem.weights, spec, torch.device("cpu"))
    rows = rows or backend.default_max_local_rows(spec, tokens)
    size = backend.workspace_bytes(spec, tokens, rows)
    guard = torch.full((size + 512,), 0xFF, dtype=torch.uint8)
    at = -guard.data_ptr() % 256
    workspace = guard[at : at + size]
    out = torch.full((tokens, spec.hidden_size), float("nan"), dtype=torch.bfloat16)
    ids, topk_weights = problem.topk_ids[:tokens], problem.topk_weights[:tokens]
    backend.forward(weights, problem.x[:tokens], ids, topk_weights, workspace, out, max_local_rows=rows)
    if not bool((guard[:at] == 0xFF).all() and (guard[at + size :] == 0xFF).all()):
        raise AssertionError("wrote outside the workspace")
    return out


def against_reference(spec, tokens, **options):
    """Return the error metrics of one case."""
    run_options = {k: options.pop(k) for k in ("backend", "rows") if k in options}
    problem = make_problem(spec, tokens, **options)
    metrics = error_metrics(run(problem, **run_options), problem.reference())
    return {"rms": metrics.rms, "max": metrics.max, "token": metrics.token}


def windows():
    """Small windows against one large one: equal bit for bit."""
    spec = replace(SMALL, top_k=4, num_experts=5, local_experts=range(0))
    problem = make_problem(spec, 70, routing="uniform", seed=3)
    return {"equal": torch.equal(run(problem, rows=1), run(problem, rows=4096))}


def invariant():
    """A token alone and in a batch: equal bit for bit."""
    problem = make_problem(SMALL, 40, seed=4)
    whole = run(problem, BATCH_INVARIANT)
    parts = {str(n): torch.equal(run(problem, BATCH_INVARIANT, tokens=n), whole[:n]) for n in (1, 17)}
    return {"equal": all(parts.values())}


def lane_order():
    """The storage that Triton up to 3.6 wants, narrow and wide."""
    original = triton_compat.lane_order
    triton_compat.lane_order = lambda: True
    try:
        few = against_reference(SMALL, 3)
        wide = against_reference(replace(SMALL, num_experts=2, local_experts=range(0), intermediate_size=96), 30)
    finally:
        triton_compat.lane_order = original
    return {key: max(few[key], wide[key]) for key in few}


def nan_tokens():
    """A token of NaN stays NaN through every clamp, and alone."""
    kept = {}
    for activation in (OAI, SwiGLU(limit=7.0), SwiGLUStep(limit=7.0), ReLU2(), SiTU(4.0, 25.0), GeGLU()):
        problem = make_problem(replace(SMALL, activation=activation), 2)
        problem.x[1] = float("nan")
        nan = run(problem).isnan()
        kept[activation.name] = bool(nan[1].all()) and not bool(nan[0].any())
    return kept


def none_local():
    """Nothing to do: zeros."""
    problem = make_problem(replace(SMALL, local_experts=range(2, 4)), 3, routing="none_local")
    return {"zero": not bool(run(problem).any())}


@contextlib.contextmanager
def only(entry):
    """Let every call take one entry of the table."""
    original = plan.tuned
    table = {**original(90, False), "few": None, "sorted": [{**entry, "rows_per_expert": 1e9}]}
    plan.tuned = lambda *_: table
    plan.make_plan.cache_clear()
    try:
        yield
    finally:
        plan.tuned = original
        plan.make_plan.cache_clear()


def every_width():
    """Experts with as many rows as a composite width holds and with one more, for every entry of Hopper's table."""
    worst = {"rms": 0.0, "max": 0.0, "token": 0.0}
    entries = {tuple(entry["columns"]): entry for entry in tuned(90, False)["sorted"]}
    for columns, entry in entries.items():
        if len(columns) == 1:
            continue
        counts = [width + more for width in columns for more in (0, 1)]
        spec = replace(SMALL, num_experts=len(counts), top_k=1, local_experts=range(0))
        tokens = sum(counts)
        problem = make_problem(spec, tokens, seed=5)
        ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
        problem = replace(
            problem, topk_ids=ids[torch.randperm(tokens, generator=torch.Generator().manual_seed(6))].to(torch.int32)
        )
        with only(entry):
            metrics = error_metrics(run(problem), problem.reference())
        worst = {key: max(value, getattr(metrics, key)) for key, value in worst.items()}
    return worst


CASES = {
    "one_token": lambda: against_reference(SMALL, 1),
    "few": lambda: against_reference(replace(SMALL, intermediate_size=96), 5, minus_one=0.3),
    "few_shared_experts": lambda: against_reference(replace(SMALL, num_experts=2, local_experts=range(0)), 10),
    "few_leaders": lambda: against_reference(replace(SMALL, top_k=5), 14, minus_one=0.1),
    "few_duplicates": lambda: against_reference(SMALL, 3, routing="duplicates"),
    "duplicates": lambda: against_reference(replace(SMALL, top_k=3), 70, routing="duplicates"),
    "two_blocks": lambda: against_reference(replace(SMALL, num_experts=20), 90, minus_one=0.2),
    "few_none_local": none_local,
    "few_direct": lambda: against_reference(replace(SMALL, num_experts=12, local_experts=range(5, 9)), 4),
    "few_listed_foreign": lambda: against_reference(
        replace(SMALL, num_experts=24, top_k=5, local_experts=range(5, 9)), 14, minus_one=0.1
    ),
    "rank_in_middle": lambda: against_reference(replace(SMALL, num_experts=12, local_experts=range(5, 9)), 20),
    "int64_ids": lambda: against_reference(SMALL, 18, ids_dtype=torch.int64),
    "odd_top_k": lambda: against_reference(replace(SMALL, top_k=3), 19, minus_one=0.2),
    "wide_tiles": lambda: against_reference(replace(SMALL, num_experts=2, local_experts=range(0), hidden_size=96), 60),
    "every_width": every_width,
    "half_block": lambda: against_reference(replace(SMALL, hidden_size=32, intermediate_size=32), 17),
    "biases": lambda: against_reference(replace(SMALL, activation=OAI, bias=True, hidden_size=160), 17),
    "bf16": lambda: against_reference(replace(SMALL, weight_format="bf16", intermediate_size=48), 17),
    "bf16_few": lambda: against_reference(replace(SMALL, weight_format="bf16", hidden_size=48), 2),
    "situ_up": lambda: against_reference(replace(SMALL, activation=SiTU(4.0)), 2),
    "swiglu": lambda: against_reference(replace(SMALL, activation=SwiGLU()), 2),
    "swiglu_limit": lambda: against_reference(replace(SMALL, activation=SwiGLU(limit=7.0)), 2),
    "swiglu_step": lambda: against_reference(replace(SMALL, activation=SwiGLUStep(limit=7.0)), 2),
    "geglu": lambda: against_reference(replace(SMALL, activation=GeGLU()), 2),
    "geglu_tanh": lambda: against_reference(replace(SMALL, activation=GeGLU(approximate="tanh")), 2),
    "relu2": lambda: against_reference(replace(SMALL, activation=ReLU2()), 2),
    "nan_tokens": nan_tokens,
    "lane_order": lane_order,
    "windows": windows,
    "invariant": invariant,
}  # fmt: skip


def main() -> None:
    """Run the cases named on the command line, or all."""
    torch.set_num_threads(1)
    assert prepared_module.DEFAULT_CAPABILITY == 90
    for name in sys.argv[1:] or CASES:
        try:
            result = CASES[name]()
        except Exception as error:  # noqa: BLE001 - a failed case is a result
            result = {"failed": f"{type(error).__name__}: {error}"[:600]}
        sys.stdout.write(json.dumps({"case": name, **result}) + "\n")


if __name__ == "__main__":
    main()
