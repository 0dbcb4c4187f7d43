"""Turn results of `portamoe bench --json` into the tables of README.md and RESULTS_H200.md.

    python benchmarks/tables.py RESULT.json...            # print every block
    python benchmarks/tables.py --write RESULT.json...    # put the blocks into the files that have their markers

A block stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`. All rows of a cell, a case at a number of
tokens, come from one run: where several files hold a cell, the first one counts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "common"), str(ROOT)]

from benchmarks.plots import rows_of  # noqa: E402 - the checkout need not be installed
from portamoe.cli._report import FLOOR, PEER, best_peer, by_cell  # noqa: E402
from portamoe.cli.bench import DEFAULT_TOKENS  # noqa: E402

FILES = ("README.md", "benchmarks/RESULTS_H200.md")
FUSED, UNFUSED, INVARIANT = "triton_fused", "triton_unfused", "triton_fused_invariant"
#: µs that triton_fused should reach on an H200.
GOALS = {
    "k3-ep8": {1: 20, 4: 50, 16: 130, 64: 335, 256: 530, 1024: 650, 4096: 1150, 8192: 2100},
    "k3-tp8": {1: 17, 4: 48, 16: 145, 64: 370, 256: 565, 1024: 745, 4096: 1420, 8192: 2620},
    "gptoss-situ": {1: 30, 256: 560, 4096: 1700},
}
TABLED = tuple(int(count) for count in DEFAULT_TOKENS.split(","))
#: Ratios between which two times count as level.
TIE = 0.05
TITLES = {"k3-ep": "Kimi-K3 EP", "k3-tp": "Kimi-K3 TP", "gptoss-situ": "gpt-oss sizes, SiTU", "gptoss": "gpt-oss"}

Json = dict[str, Any]
Key = tuple[str, int]
Cells = dict[Key, dict[str, Json]]


def cells_of(reports: Iterable[Json]) -> Cells:
    """Return the rows by cell and name; a cell of an earlier report is not mixed with a later one's."""
    cells: Cells = {}
    for report in reports:
        for key, found in by_cell(rows_of(report)).items():
            if FLOOR in found and len(found) > 1:
                cells.setdefault(key, found)
    return dict(sorted(cells.items(), key=lambda item: (_order(item[0][0]), item[0][1])))


def _order(case: str) -> tuple[int, str]:
    layers = ("k3-ep8", "k3-tp8", "gptoss-situ", "gptoss", "k3-ep16", "k3-ep32", "k3-tp16")
    layer, _, routing = case.partition("_")
    return (layers.index(layer) if layer in layers else len(layers)), {"": "0", "skew": "1"}.get(routing, "2")


def title(case: str) -> str:
    """Return the case's name for a table."""
    layer, _, routing = case.partition("_")
    for start, name in TITLES.items():
        if layer.startswith(start):
            layer = name + layer.removeprefix(start)
            break
    return layer + {"": "", "skew": ", skewed"}.get(routing, f", {routing}")


def us(row: Json | None, digits: int = 1) -> str:
    """Return a row's µs: decimals below 100 only."""
    if row is None or not row.get("us"):
        return "-" if row is None else "failed"
    value = float(row["us"])
    text = f"{value:,.0f}" if value >= 100 or not digits else f"{value:.{digits}f}"
    return text + (" wrong" if row.get("wrong") else "")


def _markdown(head: list[str], lines: Iterable[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _right(row: Json | None) -> float | None:
    return float(row["us"]) if row and row.get("us") and not row.get("wrong") else None


def comparison(cells: Cells, wanted: Callable[[str, int], bool], goals: bool = False) -> str:
    """Return the table of both backends beside the floor and the best peer of the same run."""
    head = [
        "case",
        "tokens",
        "floor",
        FUSED,
        *(["goal"] if goals else []),
        "best peer",
        "fused / peer",
        "fused / floor",
    ]
    lines = []
    for (case, tokens), found in cells.items():
        if not wanted(case, tokens):
            continue
        best, fused, floor = best_peer(list(found.values())), _right(found.get(FUSED)), float(found[FLOOR]["us"])
        goal = GOALS.get(case, {}).get(tokens)
        peer = f"{us(best)} ({best['name'].removeprefix(PEER)})" if best else "-"
        lines.append(
            [
                title(case),
                f"{tokens:,}",
                us(found[FLOOR]),
                us(found.get(FUSED)),
                *([f"{goal:,}" if goal else ""] if goals else []),
                peer,
                f"{fused / best['us']:.2f}" if fused and best else "-",
                f"{fused / floor:.2f}" if fused else "-",
                us(found.get(UNFUSED)),
            ]
        )
    return _markdown([*head, UNFUSED], lines)


def every_peer(cells: Cells, wanted: Callable[[str, int], bool]) -> str:
    """Return the table of all implementations."""
    names = list(dict.fromkeys(name for found in cells.values() for name in found if name != FLOOR))
    names.sort(key=lambda name: name.startswith(PEER))
    shown = [(key, found) for key, found in cells.items() if wanted(*key)]
    lines = [[title(case), f"{t:,}", *(us(found.get(name), 0) for name in names)] for (case, t), found in shown]
    return _markdown(["case", "tokens", *(name.removeprefix(PEER) for name in names)], lines)


def readme(cells: Cells) -> str:
    """Return README's table: EP8 and TP8 side by side."""
    head = ["tokens"]
    for name in ("EP8", "TP8"):
        head += [f"{name}: floor", f"`{FUSED}`", f"`{UNFUSED}`", "best peer"]
    lines = []
    for tokens in TABLED:
        line = [f"{tokens:,}"]
        for case in ("k3-ep8", "k3-tp8"):
            found = cells.get((case, tokens), {})
            shown = [found.get(FLOOR), found.get(FUSED), found.get(UNFUSED), best_peer(list(found.values()))]
            line += [us(row, 0) for row in shown]
        lines.append(line)
    return _markdown(head, lines)


def verdict(cells: Cells) -> str:
    """Return what the cells say: where a peer is ahead or level, and which goals are missed, by how much."""
    behind, level, missed, wrong = [], [], [], []
    for (case, tokens), found in cells.items():
        name, fused, best = f"{title(case)} {tokens:,}", _right(found.get(FUSED)), best_peer(list(found.values()))
        wrong += [f"{name} {row['name']}" for row in found.values() if row.get("wrong")]
        if fused is None:
            continue
        if best:
            ratio = fused / float(best["us"])
            (behind if ratio > 1 + TIE else level if ratio > 1 - TIE else []).append(f"{name} ({ratio:.2f})")
        goal = GOALS.get(case, {}).get(tokens)
        if goal and fused > goal:
            missed.append(f"{name} ({100 * (fused / goal - 1):.1f} %)")
    parts = {
        "Behind the best peer": behind,
        f"Level with it (within {100 * TIE:.0f} %)": level,
        "Goals missed": missed,
        "Wrong results": wrong,
    }
    return "\n".join(f"- {name}: {'; '.join(found) or 'none'}." for name, found in parts.items())


def invariant(cells: Cells) -> str:
    """Return the table of the batch-invariant mode beside the default."""
    lines = []
    for (case, tokens), found in cells.items():
        default, own = _right(found.get(FUSED)), _right(found.get(INVARIANT))
        ratio = f"{own / default:.2f}" if own and default else "-"
        lines.append([title(case), f"{tokens:,}", us(found.get(FUSED)), us(found.get(INVARIANT)), ratio])
    return _markdown(["case", "tokens", FUSED, INVARIANT, "ratio"], lines)


def blocks(reports: Sequence[Json]) -> dict[str, str]:
    """Return the text of every block by name; reports of the batch-invariant mode serve its table only."""
    invariants = [any(row["name"] == INVARIANT for row in rows_of(report)) for report in reports]
    cells = cells_of(report for report, own in zip(reports, invariants, strict=True) if not own)
    beside = cells_of(report for report, own in zip(reports, invariants, strict=True) if own)
    shards = ("k3-ep16", "k3-ep32", "k3-tp16")

    def tabled(case: str, tokens: int) -> bool:
        return case in GOALS and tokens in TABLED

    return {
        "readme": readme(cells),
        "tabled": comparison(cells, tabled, goals=True),
        "between": comparison(cells, lambda case, tokens: case in GOALS and tokens not in TABLED),
        "routing": comparison(cells, lambda case, _: "_" in case),
        "shards": comparison(cells, lambda case, _: case in shards or case == "gptoss"),
        "peers": every_peer(cells, tabled),
        "invariant": invariant(beside),
        "verdict": verdict(cells),
    }


def put(text: str, found: dict[str, str]) -> str:
    """Return the text with the content of every marked block replaced; a marker without an end is refused."""
    for name in re.findall(r"<!-- bench:(\w+) -->", text):
        if name not in found or f"<!-- /bench:{name} -->" not in text:
            raise ValueError(f"block {name!r}: unknown, or without <!-- /bench:{name} -->")
        begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        before, rest = text.split(begin, 1)
        text = f"{before}{begin}\n\n{found[name]}\n\n{end}{rest.split(end, 1)[1]}"
    return text


def main() -> None:
    """Read the files, print or write the blocks."""
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    if not arguments:
        raise SystemExit(__doc__)
    found = blocks([json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments])
    if "--write" in sys.argv:
        for name in FILES:
            file = ROOT / name
            file.write_text(put(file.read_text(encoding="utf-8"), found), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in found.items()))


if __name__ == "__main__":
    main()
