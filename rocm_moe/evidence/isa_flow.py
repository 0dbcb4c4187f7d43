"""The loops of a compiled kernel, from the labels and branches of its assembler text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LABEL = re.compile(r"^(\.L\w+):")
_BRANCH = re.compile(r"^\s+(s_c?branch\w*)\s+(\.L\w+)")
_END = re.compile(r"^\s+(s_branch|s_endpgm|s_setpc_b64)\b")


def loops(lines: Sequence[str]) -> list[frozenset[int]]:
    """Return the line numbers of each natural loop.

    A backward jump alone is no loop: compilers also lay code out so that an exit jumps backwards. It is one if its
    target leads back to it; the body is what reaches the jump without passing the target again.
    """
    blocks, edges = _graph(lines)
    before: dict[int, set[int]] = {start: set() for start in blocks}
    for source, targets in edges.items():
        for target in targets:
            before[target].add(source)
    bodies: dict[int, set[int]] = {}
    for source, targets in edges.items():
        for header in targets:
            if header <= source and source in _reachable(header, edges):
                bodies.setdefault(header, {header}).update(_reachable(source, before, stop=header))
    return [frozenset(i for block in body for i in range(block, blocks[block])) for body in bodies.values()]


def innermost(found: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return the loops that contain no other."""
    return [loop for loop in found if not any(other < loop for other in found)]


def _graph(lines: Sequence[str]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Return basic blocks (first line -> line after the last) and the blocks that each may continue with."""
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    starts = {0, *labels.values()}
    starts |= {
        i + 1 for i, line in enumerate(lines) if (_BRANCH.match(line) or _END.match(line)) and i + 1 < len(lines)
    }
    order = sorted(starts)
    blocks = dict(zip(order, [*order[1:], len(lines)], strict=True))
    edges: dict[int, list[int]] = {}
    for start, end in blocks.items():
        last = lines[end - 1]
        targets = [end] if end in blocks and not _END.match(last) else []
        if (match := _BRANCH.match(last)) and match.group(2) in labels:
            targets.append(labels[match.group(2)])
        edges[start] = targets
    return blocks, edges


def _reachable(start: int, edges: dict[int, list[int]] | dict[int, set[int]], stop: int | None = None) -> set[int]:
    seen = {start}
    waiting = [start] if start != stop else []
    while waiting:
        for target in edges[waiting.pop()]:
            if target not in seen:
                seen.add(target)
                if target != stop:
                    waiting.append(target)
    return seen
