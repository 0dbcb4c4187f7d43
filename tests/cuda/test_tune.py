"""Tiles of the user's own: where they are looked for, which entries are measured, what a damaged file says."""

from __future__ import annotations

import copy
import json

import pytest

pytest.importorskip("torch")

from cuda_moe import tune
from cuda_moe.compile_check import SPECS
from cuda_moe.plan import FOLDER_VARIABLE, plan_of, tuned, tuned_file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    tuned.cache_clear()
    yield tmp_path
    tuned.cache_clear()


def test_own_tiles_come_before_the_packaged_ones(folder):
    table = copy.deepcopy(tuned(90, False))
    table["sorted"][0]["gate_up"]["stages"] = 9
    tune._write(tuned_file(str(folder), 90), table, 90, "a GPU")
    tuned.cache_clear()
    assert tuned(90, False)["sorted"][0]["gate_up"]["stages"] == 9
    assert tuned(80, False)["sorted"][0]["gate_up"]["stages"] != 9
    assert json.loads(tuned_file(str(folder), 90).read_text())["device"] == "a GPU"


def test_a_damaged_file_is_named(folder):
    file = tuned_file(str(folder), 90)
    file.parent.mkdir()
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"triton_fused/sm_90\.json"):
        tuned(90, False)


def test_every_entry_of_a_spec_is_measured_where_it_is_used():
    table = tuned(90, False)
    for spec in SPECS.values():
        used = list(tune.uses(table, spec, 8192))
        assert len({tokens for _, tokens in used}) == len(used)
        for entry, tokens in used:
            rows = entry["gate_up"]["rows"]
            changed = copy.deepcopy(table)
            part, index = next((p, t.index(entry)) for p, t in table.items() if entry in t)
            changed[part][index]["gate_up"]["rows"] = 16 * rows
            assert plan_of(changed, spec, tokens, 90).gate_up != plan_of(table, spec, tokens, 90).gate_up


def test_nowhere_to_write_is_said(monkeypatch):
    import torch

    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=FOLDER_VARIABLE):
        tune.run(SPECS["small"], torch.device("cuda"))
