"""`portamoe bench --gemm`: the plan's projections against torch on this GPU; `--tune` makes the plan anew."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.cli import _cases, _measure
from portamoe.gpu_timing import capture, median_ms

if TYPE_CHECKING:
    import torch

    from portamoe.device import Device
    from portamoe.linear_provider import Candidate, LinearProvider, Timed

#: Rows of x that are timed unless others are asked for.
ROWS = (1, 2, 4, 8, 16)
#: Relative RMS against float64 that a bf16 result may have.
TOLERANCE = 2e-3
#: Weights in one graph: several times the L2, and enough launches for a steady state.
LEAST_COPIES, MOST_COPIES = 2, 192
TUNED_VARIABLE = "PORTAMOE_TUNED_DIR"
#: Milliseconds of replays for one candidate while tuning, and for a row of the table.
TUNE_MS, TABLE_MS = 1.5, 12.0

Json = dict[str, Any]
#: product(x, weight, out)
Product = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], Any]


def execute(args: argparse.Namespace, device: torch.device, about: Json) -> int:
    """Time every planned shape, print the table, write what was asked for; status 1 if a result was wrong."""
    import torch

    from portamoe.detection import detect
    from portamoe.linear_provider import providers

    facts = detect().device(str(device))
    found = providers(facts)
    if not found:
        raise ValueError(f"nobody provides kernels for projections on {facts.name} ({facts.arch}); torch serves them")
    provider = found[0]
    shapes = _shapes(args.shapes) if args.shapes else provider.shapes(facts)
    folder = _tuned_folder() if args.tune else None
    with torch.cuda.device(device):
        read = _measure.limits(device)["read_tbs"]
        rows, timed, torch_us = _rows(provider, shapes, _rows_of(args), facts, read, tune=args.tune)
    report = {"schema": 1, **about, "read_tbs": read, "rows": rows}
    sys.stdout.write(table(report) + "\n")
    if folder is not None:
        name, text = provider.plan(facts, about, timed, torch_us)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {folder / name}\n")
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(row.get("wrong") for row in rows))


def _tuned_folder() -> Path:
    folder = os.environ.get(TUNED_VARIABLE)
    if not folder:
        raise ValueError(f"--gemm --tune writes to ${TUNED_VARIABLE}, which is not set; set it to a folder of yours")
    return Path(folder)


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    out = []
    for part in text.split(","):
        n, _, k = part.partition("x")
        if not (n.isdigit() and k.isdigit()):
            raise ValueError(f"--shapes takes NxK like 1536x7168, got {part!r}")
        out.append((int(n), int(k)))
    return tuple(out)


def _rows_of(args: argparse.Namespace) -> tuple[int, ...]:
    from portamoe.cli.bench import DEFAULT_TOKENS
    from portamoe.linear_provider import MOST_ROWS

    if args.tokens == DEFAULT_TOKENS:
        return ROWS
    rows = tuple(sorted({int(text) for text in args.tokens.split(",")}))
    if not all(1 <= m <= MOST_ROWS for m in rows):
        raise ValueError(f"--gemm takes 1 to {MOST_ROWS} tokens, got {args.tokens}; torch serves more")
    return rows


def _rows(
    provider: LinearProvider,
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    facts: Device,
    read_tbs: float,
    *,
    tune: bool,
) -> tuple[list[Json], list[Timed], dict[tuple[int, int, int], float]]:
    import torch

    from portamoe.linear_provider import Timed

    rows: list[Json] = []
    timed: list[Timed] = []
    torch_us: dict[tuple[int, int, int], float] = {}
    for n, k in shapes:
        table = provider.table(n, k, facts)
        for m in tokens:
            sets = make_sets(n, k, m, torch.device(facts.torch_name))
            truth = sets[0][0].double() @ sets[0][1].double().t()
            us, _ = time_product(lambda x, w, y: torch.mm(x, w.t(), out=y), sets, truth, TABLE_MS)
            torch_us[n, k, m] = us
            row: Json = {"n": n, "k": k, "tokens": m, "torch_us": round(us, 2)}
            row["floor_us"] = round(2 * (n * k + m * (n + k)) / read_tbs / 1e6, 2)
            if tune:
                for candidate in provider.candidates(n, k, m, facts):
                    took, error = _try(candidate, sets, truth, row)
                    if error <= TOLERANCE:
                        timed.append(Timed(n, k, m, candidate.choice, took))
            kernel = table.kernel(m) if table else None
            if table and kernel:
                took, error = time_product(kernel, sets, truth, TABLE_MS)
                row |= {"plan": table.names[m - 1], "us": round(took, 2), "rms": float(f"{error:.3g}")}
                row["wrong"] = not error <= TOLERANCE
            rows.append(row)
    return rows, timed, torch_us


def _try(candidate: Candidate, sets: Sequence[Any], truth: torch.Tensor, row: Json) -> tuple[float, float]:
    try:
        return time_product(candidate.kernel, sets, truth, TUNE_MS)
    except Exception as error:  # noqa: BLE001 - one candidate that does not compile must not end the run
        row.setdefault("failed", {})[candidate.label] = f"{type(error).__name__}: {error}"[:300]
        return math.inf, math.inf


def make_sets(n: int, k: int, m: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return (x, weight, out) for one graph, as many as outgrow the L2 cache."""
    import torch

    copies = max(LEAST_COPIES, min(MOST_COPIES, math.ceil(_cases.ROTATED_BYTES / (2 * n * k))))
    generator = torch.Generator(device=device).manual_seed(n + k + m)

    def draw(rows: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, k, device=device, generator=generator, dtype=torch.bfloat16) * scale

    return [
        (draw(m, 1.0), draw(n, 0.02), torch.empty(m, n, device=device, dtype=torch.bfloat16)) for _ in range(copies)
    ]


def time_product(product: Product, sets: Sequence[Any], truth: torch.Tensor, budget_ms: float) -> tuple[float, float]:
    """Return median µs of `product(x, weight, out)` under graph replay, and the first result's relative RMS error.

    truth:      (M, N) float64 of the first set; its output is poisoned before it is computed
    budget_ms:  of replays
    """
    import torch

    product(*sets[0])
    graph = capture(lambda: [product(*s) for s in sets])
    sets[0][2].fill_(float("nan"))
    once = median_ms(graph.replay, 1)
    replays = int(max(5, min(40, budget_ms / max(once, 1e-3))))
    us = median_ms(graph.replay, replays) * 1e3 / len(sets)
    torch.cuda.synchronize()
    error = (sets[0][2].double() - truth).norm() / truth.norm()
    return us, float(error)


def table(report: Json) -> str:
    """Return the table: per shape and M the floor, torch, the plan's kernel, its gain and its share of the limit."""
    lines = [["N x K", "M", "floor", "torch", "plan", "us", "gain", "of read"]]
    for row in report["rows"]:
        line = [f"{row['n']}x{row['k']}", str(row["tokens"]), f"{row['floor_us']:.1f}", f"{row['torch_us']:.1f}"]
        if "us" in row:
            gain, share = row["torch_us"] / row["us"], row["floor_us"] / row["us"]
            line += [
                row["plan"] + (" WRONG" if row["wrong"] else ""),
                f"{row['us']:.1f}",
                f"{gain:.2f}",
                f"{share:.0%}",
            ]
        else:
            line += ["torch", "-", "-", f"{row['floor_us'] / row['torch_us']:.0%}"]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    return f"{report['device']}, torch {report['torch']}, {report['date']}: read {report['read_tbs']:.3g} TB/s\n{text}"
