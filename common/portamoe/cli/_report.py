"""What `portamoe bench` found: a file that grows with every row, ratios, and the table."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portamoe.whole_files import written_beside

Json = dict[str, Any]
FLOOR = "floor"
#: Before the names of peers, in tables and files.
PEER = "peer:"


@dataclass
class Report:
    """Facts of the run and its rows; written after every change, so that a run that is cut off keeps what it has."""

    about: Json
    file: Path | None = None
    rows: list[Json] = field(default_factory=list)

    def add(self, row: Json) -> Json:
        """Append a row, write the file, return the row."""
        self.rows.append(row)
        self.write()
        return row

    def write(self) -> None:
        """Write the file, if there is to be one: one row a line."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in self.about.items()]
        rows = ",\n".join("  " + json.dumps(row) for row in self.rows)
        with written_beside(self.file) as beside:
            beside.write_text("{\n" + ",\n".join([*head, f' "rows": [\n{rows}\n ]']) + "\n}\n", encoding="utf-8")

    @property
    def failed(self) -> bool:
        """Whether a result of a backend was wrong or missing, or nothing was timed."""
        own = [row for row in self.rows if row["name"] != FLOOR and not row["name"].startswith(PEER)]
        return not any("us" in row for row in own) or any(row.get("wrong") or "failed" in row for row in own)

    def to_dict(self) -> Json:
        """Return the content of the file."""
        return {**self.about, "rows": self.rows}


def best_peer(rows: list[Json]) -> Json | None:
    """Return the fastest right peer among the rows of one case and number of tokens."""
    right = [r for r in rows if r["name"].startswith(PEER) and r.get("us") and not r.get("wrong")]
    return min(right, key=lambda row: float(row["us"]), default=None)


def by_cell(rows: list[Json]) -> dict[tuple[str, int], dict[str, Json]]:
    """Return the rows by (case, tokens) and name."""
    cells: dict[tuple[str, int], dict[str, Json]] = {}
    for row in rows:
        if row["tokens"] is not None:
            cells.setdefault((row["case"], row["tokens"]), {})[row["name"]] = row
    return cells


def table(report: Json) -> str:
    """Return the table: a line per case and number of tokens, and per implementation `µs xR /P`.

    R is the ratio to the floor, P that to the best right peer.
    """
    cells = by_cell(report["rows"])
    names = list(dict.fromkeys(name for found in cells.values() for name in found if name != FLOOR))
    lines = [["case", "tokens", "floor", *names, "best peer"]]
    for (case, tokens), found in cells.items():
        floor, best = found[FLOOR]["us"], best_peer(list(found.values()))
        shown = [_cell(found.get(name), floor, best) for name in names]
        last = f"{best['us']:.1f} {best['name'].removeprefix(PEER)}" if best else "-"
        lines.append([case, str(tokens), f"{floor:.1f}", *shown, last])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    failed = [
        f"{row['name']} {row['case']} {row['tokens'] or ''}: {row['failed']}"
        for row in report["rows"]
        if "failed" in row
    ]
    head = f"{report['device']}, torch {report['torch']}, {report['date']}: " + ", ".join(
        f"{name} {value:.4g}" for name, value in report["limits"].items()
    )
    return os.linesep.join([head, text, *failed])


def _cell(row: Json | None, floor: float, best: Json | None) -> str:
    if row is None or "us" not in row:
        return "-" if row is None else "failed"
    peer = f" /{row['us'] / best['us']:.2f}" if best else ""
    return f"{row['us']:.1f} x{row['us'] / floor:.2f}{peer}" + (" WRONG" if row["wrong"] else "")
