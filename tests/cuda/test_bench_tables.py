"""Tables of benchmark results: one run a cell, right results only, blocks put where their markers are."""

from __future__ import annotations

import pytest

from benchmarks import tables


def report(case, tokens, **us):
    rows = [{"case": case, "tokens": tokens, "name": "floor", "us": 10.0}]
    for name, value in us.items():
        rows.append({"case": case, "tokens": tokens, "name": name.replace("__", ":"), "us": value, "wrong": value < 10})
    return {"rows": rows}


def test_a_cell_is_of_one_run():
    first = report("k3-ep8", 1, triton_fused=21.0)
    second = report("k3-ep8", 1, triton_fused=19.0, peer__marlin=30.0)
    cells = tables.cells_of([first, second])
    assert set(cells["k3-ep8", 1]) == {"floor", "triton_fused"}
    alone = {"rows": first["rows"][:1]}
    assert "peer:marlin" in tables.cells_of([alone, second])["k3-ep8", 1]


def test_ratios_are_to_the_best_right_peer():
    cells = tables.cells_of([report("k3-ep8", 1, triton_fused=21.0, peer__marlin=42.0, peer__liar=5.0)])
    line = tables.comparison(cells, lambda *_: True, goals=True).splitlines()[2]
    assert line == "| Kimi-K3 EP8 | 1 | 10.0 | 21.0 | 20 | 42.0 (marlin) | 0.50 | 2.10 | - |"
    assert "5 wrong" in tables.every_peer(cells, lambda *_: True)


def test_every_cell_has_its_table_and_every_table_its_order():
    made = [("k3-tp16", 64), ("k3-ep8_one-sided", 64), ("k3-ep8", 2), ("k3-ep8", 4096), ("k3-ep8_skew", 64)]
    reports = [report(case, tokens, triton_fused=1234.0) for case, tokens in made]
    found = tables.blocks(reports)
    assert list(tables.cells_of(reports))[:3] == [("k3-ep8", 2), ("k3-ep8", 4096), ("k3-ep8_skew", 64)]
    assert "| Kimi-K3 EP8 | 4,096 | 10.0 | 1,234 | 1,150 |" in found["tabled"]
    assert "| Kimi-K3 EP8 | 2 |" in found["between"]
    assert found["routing"].splitlines()[-1].startswith("| Kimi-K3 EP8, one-sided | 64 |")
    assert "| Kimi-K3 TP16 | 64 |" in found["shards"]
    assert found["readme"].splitlines()[8].startswith("| 4,096 | 10 | 1,234 | - | - |")


def test_the_invariant_mode_has_a_table_of_its_own():
    both = report("k3-ep8", 1, triton_fused=20.0, triton_fused_invariant=30.0)
    found = tables.blocks([both, report("k3-ep8", 1, triton_fused=21.0)])
    assert found["invariant"].splitlines()[-1] == "| Kimi-K3 EP8 | 1 | 20.0 | 30.0 | 1.50 |"
    assert "| Kimi-K3 EP8 | 1 | 10.0 | 21.0 |" in found["tabled"]


def test_the_verdict_names_what_is_behind_level_missed_or_wrong():
    made = [
        report("k3-ep8", 1, triton_fused=30.0, peer__marlin=20.0),
        report("k3-ep8", 4, triton_fused=50.0, peer__marlin=49.0),
        report("k3-ep8", 16, triton_fused=100.0, peer__marlin=200.0, peer__liar=9.0),
    ]
    text = tables.verdict(tables.cells_of(made))
    assert "Behind the best peer: Kimi-K3 EP8 1 (1.50)." in text
    assert "Level with it (within 5 %): Kimi-K3 EP8 4 (1.02)." in text
    assert "Goals missed: Kimi-K3 EP8 1 (50.0 %)." in text
    assert "Wrong results: Kimi-K3 EP8 16 peer:liar." in text


def test_blocks_go_between_their_markers():
    text = "a\n<!-- bench:one -->\nold\n<!-- /bench:one -->\nb\n"
    once = tables.put(text, {"one": "| new |"})
    assert once == "a\n<!-- bench:one -->\n\n| new |\n\n<!-- /bench:one -->\nb\n"
    assert tables.put(once, {"one": "| new |"}) == once
    with pytest.raises(ValueError, match="one"):
        tables.put("<!-- bench:one -->", {"one": ""})
    with pytest.raises(ValueError, match="other"):
        tables.put("<!-- bench:other --><!-- /bench:other -->", {"one": ""})


def test_the_markers_of_the_repository_are_known():
    known = tables.blocks([])
    for name in tables.FILES:
        tables.put((tables.ROOT / name).read_text(encoding="utf-8"), known)
