"""One rank of a test: `python worker.py SCENARIO RANK SIZE PORT`; writes what it saw as one JSON line."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from portamoe.distributed import ExpertParallel, RankError, RankGroup
from portamoe.distributed._checks import CASES, SPEC, Bench, Case, whole
from portamoe.testing import make_problem

torch.set_num_threads(1)
#: Seconds; a missing rank must be named within them.
TIMEOUT = 5.0


def checks(ranks: RankGroup, names: tuple[str, ...] | None = None) -> dict[str, object]:
    bench = Bench(ranks, "torch")
    cases = [case for case in CASES if names is None or any(name in case.name for name in names)]
    results = [bench.run(case) for case in cases]
    results += [result for sums in ("exact", "partial_sums") if (result := bench.run_slices(sums))]
    return {r.name: {"passed": r.passed, "bitwise": r.bitwise, "promised": r.promised, "rms": r.rms} for r in results}


def some_checks(ranks: RankGroup) -> dict[str, object]:
    return checks(ranks, ("exact: uneven", "exact: one", "exact: rounds", "partial_sums: uneven"))


def plain_call(ranks: RankGroup) -> dict[str, object]:
    """The result has the bits of one process's plain call, not only of its rows and their sum."""
    bench = Bench(ranks, "torch")
    out = {}
    for form in ("all_to_all", "all_gather"):
        parallel = ExpertParallel(bench.layer, ranks, form=form)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for ids_dtype in (torch.int32, torch.int64):
                case = Case("", "uniform", lambda rank, _size: 3 + 10 * rank, form, "exact")
                problem, mine = bench._problem(case)
                x, ids = problem.x.to(dtype), problem.topk_ids.to(ids_dtype)
                got = parallel(x[mine], ids[mine], problem.topk_weights[mine])
                expected = bench.single(x, ids, problem.topk_weights)[mine]
                out[f"{form} {dtype} {ids_dtype}"] = bool(torch.equal(got, expected)) and got.abs().max().item() > 0
    return out


def bounded(ranks: RankGroup) -> dict[str, object]:
    """Everything to one expert: no tensor of a round is larger than `buffer_bytes`, however many tokens there are."""
    from torch.utils._python_dispatch import TorchDispatchMode

    bench = Bench(ranks, "torch")
    case = Case("", "one_expert", lambda _rank, _size: 150, "all_to_all", "exact")
    problem, mine = bench._problem(case)
    inputs = [t[mine] for t in (problem.x, problem.topk_ids, problem.topk_weights)]
    expected = whole_in_windows(bench, problem)[mine]
    largest, counting, good_rows = 0, True, bench.layer.forward_rows

    def forward_rows(*args):
        nonlocal counting
        counting = False  # what the layer needs is its own affair
        good_rows(*args)
        counting = True

    bench.layer.forward_rows = forward_rows

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and counting:
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    out = {}
    for form in ("all_to_all", "all_gather"):
        parallel = ExpertParallel(bench.layer, ranks, form=form, window=20)
        largest = 0
        with Sizes():
            got = parallel(*inputs)
        close = (got.float() - expected.float()).norm() <= 1e-3 * expected.float().norm()
        rows = 2 * 20 * SPEC.top_k * SPEC.hidden_size * 4  # of the tokens that a round receives, the largest tensor
        out[form] = [bool(close), largest <= parallel.buffer_bytes, largest <= 1.1 * rows]
    return out


def whole_in_windows(bench: Bench, problem) -> torch.Tensor:
    parts = [slice(first, first + 100) for first in range(0, len(problem.x), 100)]
    return torch.cat([whole(bench.single, problem.x[p], problem.topk_ids[p], problem.topk_weights[p]) for p in parts])


def further(ranks: RankGroup) -> dict[str, object]:
    return {"plain": plain_call(ranks), "bounded": bounded(ranks), "refused": refused(ranks)}


def refused(ranks: RankGroup) -> dict[str, object]:
    """Ranks that do not fit each other are refused on all of them, by name."""
    bench = Bench(ranks, "torch")
    out = {}

    def message(make) -> str:
        try:
            make()
        except ValueError as error:
            return str(error)
        return "accepted"

    form = "all_to_all" if ranks.rank else "all_gather"
    out["form"] = message(lambda: ExpertParallel(bench.layer, ranks, form=form))
    out["overlap"] = message(lambda: ExpertParallel(bench.single, ranks))
    half = bench._layer(replace(SPEC, local_experts=range(5)), make_problem(replace(SPEC, num_experts=5), 1).weights)
    other = bench.layer if ranks.rank else half
    out["gap"] = message(lambda: ExpertParallel(other, ranks))
    out["window"] = message(lambda: ExpertParallel(bench.layer, ranks, window=10_000))
    parallel, second = ExpertParallel(bench.layer, ranks), ExpertParallel(bench.layer, ranks)
    problem = make_problem(SPEC, 3)
    x = problem.x.half() if ranks.rank else problem.x
    out["dtypes"] = message(lambda: parallel(x, problem.topk_ids, problem.topk_weights))
    mine = second if ranks.rank else parallel
    out["layers"] = message(lambda: mine(problem.x, problem.topk_ids, problem.topk_weights))
    # Two layers with groups of their own, each number 1 of it: ranks that call different ones are told.
    own = [ExpertParallel(bench.layer, timeout=60.0) for _ in range(2)]
    out["own_groups"] = message(lambda: own[ranks.rank % 2](problem.x, problem.topk_ids, problem.topk_weights))
    for layer in own:
        layer.close()
    alone = [dist.new_group([r]) for r in range(ranks.size)][ranks.rank]
    out["tensor_group"] = message(
        lambda: ExpertParallel(bench.layer, ranks, tensor_group=alone if ranks.rank else None)
    )
    # Every rank is an experts' group of its own, and all are one tensor group.
    sliced = ExpertParallel(bench.single, alone, tensor_group=ranks, timeout=60.0)
    few = problem.x[: 3 * ranks.rank]
    out["tokens"] = message(lambda: sliced(few, problem.topk_ids[: len(few)], problem.topk_weights[: len(few)]))
    sliced.ranks.close()
    try:
        parallel(problem.x, problem.topk_ids, problem.topk_weights.clone().requires_grad_())
    except RuntimeError as error:
        out["gradient"] = str(error)
    if ranks.rank:  # an argument's error that this rank gets over
        out["caught"] = message(lambda: parallel(problem.x[:2], problem.topk_ids, problem.topk_weights))
    out["after"] = message(lambda: parallel(problem.x, problem.topk_ids, problem.topk_weights))
    return out


def _missing(ranks: RankGroup, culprit: int, leave, *, form: str = "all_to_all", within: bool = False) -> object:
    """One good call, then `culprit` leaves before the second call or within it; what the others are told."""
    bench = Bench(ranks, "torch")
    parallel = ExpertParallel(bench.layer, ranks, form=form)
    problem = make_problem(SPEC, 6, seed=ranks.rank)
    inputs = (problem.x, problem.topk_ids, problem.topk_weights)
    parallel(*inputs)
    if ranks.rank == culprit:
        if within:
            bench.layer.forward_rows = lambda *_: leave()
        else:
            leave()
    start = time.monotonic()
    try:
        parallel(*inputs)
    except RankError as error:
        told = {"ranks": error.ranks, "step": error.step, "seconds": time.monotonic() - start, "message": str(error)}
    else:
        return {"message": "no error"}
    try:
        parallel(*inputs)
    except RankError as error:
        told["again"] = str(error)
    return told


def _die() -> None:
    time.sleep(1.0)  # a record is written twice a second: this one must still be
    os.kill(os.getpid(), signal.SIGKILL)


def killed(ranks: RankGroup) -> object:
    return _missing(ranks, 1, _die)


def killed_within(ranks: RankGroup) -> object:
    return _missing(ranks, 0, _die, within=True)


def stalled(ranks: RankGroup) -> object:
    return _missing(ranks, 1, lambda: time.sleep(3 * TIMEOUT), form="all_gather")


def main(scenario: str, rank: int, size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    limit = TIMEOUT if scenario in ("killed", "killed_within", "stalled") else 60.0
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    ranks = RankGroup(None, torch.device("cpu"), timeout=limit)
    result = globals()[scenario](ranks)
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    if limit == TIMEOUT:
        os._exit(0)  # a broken group does not end in an orderly way
    ranks.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
