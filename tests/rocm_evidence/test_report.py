"""The ISA report: rows, rules, goals, the committed files and the emulated results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lumi_prediction
from benchmarks.isa import render, rows
from benchmarks.isa.calls import call_rows
from rocm_moe.evidence import isa
from rocm_moe.tiles import load_table
from tests.rocm_evidence import snippets

ROOT = Path(__file__).resolve().parents[2]
MODELLED_FOLDER = ROOT / "benchmarks/results/modelled"
MODELLED = sorted(MODELLED_FOLDER.glob("gfx*.json"))
EMULATED = sorted((ROOT / "benchmarks/results/emulated").glob("*.json"))


def kernel(body: str = snippets.GEMM, *, shared: int = 4096, tile: dict[str, int] | None = None, **facts: int) -> Any:
    """Return a compiled kernel as the child process writes it."""
    return {
        "arch": "gfx90a",
        "name": "gemm1-test",
        "step": "gemm1",
        "specs": ["EP8"],
        "constants": {},
        "options": {"num_stages": 2},
        "tile": tile,
        "shared": shared,
        "warps": 4,
        "sha256": "0" * 64,
        "code": isa.parse(snippets.kernel(body, **facts)).to_dict(),
    }


DECODE = {"rows": 16, "columns": 64, "depth": 128}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (kernel(vgpr_spills=2), "VGPR spills 2"),
        (kernel(sgpr_spills=1), "SGPR spills 1"),
        (kernel(scratch=16), "scratch bytes 16"),
        (kernel(shared=70000), "LDS 70000 bytes, the limit is 65536"),
        (kernel(snippets.STRAIGHT, tile=DECODE), "no matrix instruction"),
        (kernel(vgprs=512, shared=65536) | {"warps": 16}, "no workgroup fits"),
        ({**kernel(), "error": "PassManager::run failed"}, "does not compile"),
    ],
)
def test_every_rule_can_be_broken(broken: dict[str, Any], message: str) -> None:
    found = rows.violations(broken)
    assert any(message in text for text in found), found


def test_weights_through_lds_are_found() -> None:
    # 4 waves x 64 lanes x 8 bytes are 2048; two MFMA of 16 x 16 x 16 a wave cover 32 of K: 1024 bytes of activations.
    found = rows.violations(kernel(tile={"rows": 16, "columns": 64, "depth": 128}))
    assert found == ["gfx90a gemm1-test [EP8]: weights pass through LDS (960 bytes beyond activations and scales)"]
    assert rows.violations(kernel(tile={"rows": 64, "columns": 64, "depth": 128})) == []


def test_clean_kernel_breaks_no_rule() -> None:
    assert rows.violations(kernel(snippets.STRAIGHT)) == []


def test_goals_depend_on_arch_tile_and_triton() -> None:
    def row(share: float, none: float, arch: str = "gfx90a", tokens: int = 16) -> dict[str, Any]:
        whole = {"share": share, "share_no_overlap": none, "tflops": 191.0, "tflops_no_overlap": none * 100}
        return {"arch": arch, "name": "k", "tile": {"rows": tokens}, "model": {"whole": whole}}

    assert rows.missed_goals(row(1.2, 0.8), "3.6.0") == []
    assert rows.missed_goals(row(1.2, 0.8), "3.9.0")
    assert rows.missed_goals(row(1.2, 0.7), "3.6.0")
    assert rows.missed_goals(row(1.3, 1.0, arch="gfx942"), "3.9.0") == []
    assert rows.missed_goals(row(1.3, 0.9, arch="gfx942"), "3.9.0")
    assert rows.missed_goals(row(0.5, 1.31, tokens=64), "3.9.0") == []
    assert rows.missed_goals(row(0.5, 1.29, tokens=64), "3.9.0")
    assert rows.missed_goals(row(0.1, 0.1, arch="gfx1100"), "3.9.0") == []


def test_text_has_every_kernel_and_verdict() -> None:
    row = rows.row_of(kernel(tile={"rows": 64, "columns": 64, "depth": 512}))
    report = {
        "arch": "gfx90a", "triton": "3.9.0", "date": "2026-01-01", "command": "x", "kernels": [row], "calls": [],
        "violations": ["a rule"], "missed_goals": ["a goal"], "seconds": 1,
    }  # fmt: skip
    text = render.text(report)
    for wanted in ("gemm1-test [EP8]", "modelled", "VIOLATION a rule", "GOAL MISSED a goal"):
        assert wanted in text


@pytest.mark.parametrize("path", MODELLED, ids=lambda path: path.stem)
def test_committed_report(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["schema"] == 1
    assert {"date", "command", "arch", "triton", "kernels", "calls", "violations", "missed_goals"} <= set(report)
    assert report["evidence"] == {"code": "compiled", "clocks and times": "modelled"}
    assert report["violations"] == []
    for row in report["kernels"]:
        assert row["evidence"] == "compiled"
        assert row["model"]["evidence"] == "modelled"
        assert len(row["sha256"]) == 64
        again = rows.row_of({key: value for key, value in row.items() if key != "model"})
        assert again["model"] == row["model"], "the committed figures no longer follow from the committed counts"
    assert {call["evidence"] for call in report["calls"]} <= {"modelled"}


@pytest.mark.parametrize("path", [p for p in MODELLED if p.stem.startswith("gfx90a")], ids=lambda path: path.stem)
def test_whole_calls_cover_every_shard_and_never_launch_more_than_six(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    calls = report["calls"]
    assert {(c["shard"], c["tokens"]) for c in calls} >= {(s, t) for s in ("EP8", "TP8", "EP32") for t in (1, 4, 16)}
    assert all(call["launches"] <= 6 for call in calls)
    assert call_rows(report["arch"], report["kernels"], load_table(report["arch"], {})) == calls


def test_prediction_holds_the_tables_that_follow_from_the_report() -> None:
    report = json.loads(lumi_prediction.REPORT.read_text(encoding="utf-8"))
    text = (ROOT / "docs/lumi-prediction.md").read_text(encoding="utf-8")
    assert lumi_prediction.tables(report) in text


@pytest.mark.parametrize("path", EMULATED, ids=lambda path: path.stem)
def test_emulated_results(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["evidence"] == "emulated"
    assert {"date", "arch", "triton", "results"} <= set(data)
    kernels = {row["kernel"] for row in data["results"]}
    assert kernels >= {"count_pairs", "place_pairs", "grouped_gemm_bricks", "activate", "combine"}
    for row in data["results"]:
        assert row["passed"]
        assert row["error"] <= row["limit"]
        assert len(row["sha256"]) == 64


@pytest.mark.parametrize("path", EMULATED, ids=lambda path: path.stem)
def test_the_binaries_of_kimi_k3_that_were_emulated_are_those_of_the_report(path: Path) -> None:
    emulated = json.loads(path.read_text(encoding="utf-8"))
    report = json.loads((MODELLED_FOLDER / path.name).read_text(encoding="utf-8"))
    reported = {row["sha256"] for row in report["kernels"]}
    full_size = {row["sha256"] for row in emulated["results"] if "the binary of Kimi-K3" in row["problem"]}
    assert full_size, "no full-size binary was emulated"
    assert full_size <= reported
