"""`portamoe verify`: the acceptance set, its report, its bundle, and the script that a maintainer checks one with."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from portamoe import bundle, registry, verdicts
from portamoe.acceptance import checklist, pool
from portamoe.acceptance.checklist import Subject, checks
from portamoe.acceptance.pool import Pool
from portamoe.acceptance.shares import Share
from portamoe.activations import SiTU, SwiGLU
from portamoe.cli import main, verify
from portamoe.decision import Reason
from portamoe.spec import MoESpec
from tests import faulty_backends as faulty
from tests.host_recordings import device

ROOT = Path(__file__).parents[1]
SPEC = MoESpec(
    hidden_size=64, intermediate_size=64, num_experts=8, top_k=3, activation=SiTU(beta=4.0, linear_beta=25.0)
)
HERE = device("cpu", "cpu")
GROUPS = ["canary", "activation", "shape", "tokens", "routing", "repeat", "windows", "graph"]


@pytest.fixture
def subject(monkeypatch, tmp_path):
    """Return a function that makes a fake the subject of a quick acceptance."""
    monkeypatch.setenv("PORTAMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PORTAMOE_CANARY", raising=False)
    verdicts._store.cache_clear()
    # The groups and what they find are in question here, not the number of sizes.
    monkeypatch.setattr(checklist, "TOKEN_EDGES", (1, 9))
    monkeypatch.setattr(checklist, "ACTIVATIONS", checklist.ACTIVATIONS[:2])
    few = ("typical", "none_local", "rank_in_middle", "bf16")
    monkeypatch.setattr(checklist, "EDGE_CASES", tuple(c for c in checklist.EDGE_CASES if c.name in few))

    def make(backend):
        monkeypatch.setattr(registry, "backends", lambda: (backend,))
        return Subject(backend, SPEC, SPEC, HERE, quick=True)

    return make


def by_status(found, status):
    return {f"{c.group} {c.case}": c.detail for c in found if c.status == status}


# --- the set ----------------------------------------------------------------------------------------------------------


def test_a_right_backend_passes_everything_but_what_cannot_be_run(subject):
    found = list(checks(subject(faulty.Right())))
    assert list(dict.fromkeys(c.group for c in found)) == GROUPS
    assert by_status(found, "failed") == {}
    assert by_status(found, "not run") == {
        "graph 1 tokens": "graphs need a GPU",
        "graph 33 tokens": "graphs need a GPU",
    }
    assert json.loads(json.dumps([c.to_dict() for c in found]))[0]["figures"]["verdict"]["passed"] is True


def test_the_full_set_covers_every_activation_case_and_routing():
    every = list(checklist.plan(Subject(faulty.Right(), SPEC, SPEC, HERE, quick=False)))
    counts = Counter(group for group, _, _ in every)
    assert [*GROUPS, "timing"] == list(counts)
    assert counts["activation"] == 9
    assert counts["shape"] == len(checklist.EDGE_CASES)
    assert counts["routing"] == 8
    names = {type(activation).__name__ for activation in checklist.ACTIVATIONS}
    assert names == {"SiTU", "SwiGLU", "SwiGLUOAI", "SwiGLUStep", "GeGLU", "ReLU2"}


def test_another_activation_fails_the_canary_and_the_shapes(subject):
    failed = by_status(checks(subject(faulty.Computes(SwiGLU()))), "failed")
    assert failed["canary spec"].startswith("canary: computed SwiGLU instead of SiTU")
    assert re.search(r"relative RMS .* > ", failed["shape typical"])
    assert "shape none_local" not in failed


def test_the_timed_layer_is_compared_too(subject):
    """Only its weights are so large that an offset of 32 bits wraps."""
    for backend, wrong in ((faulty.Right(), False), (faulty.Computes(SwiGLU()), True)):
        full = replace(subject(backend), quick=False)
        found = list(checks(full, Share(("timing",))))
        assert [c.status for c in found] == ["failed" if wrong else "passed"] * 4
        assert not wrong or re.search(r"relative RMS .* > ", found[0].detail)


def test_what_a_backend_refuses_is_not_run_and_says_why(subject):
    backend = faulty.Right()
    why = Reason("weight format", "bf16", "mxfp4", "use torch")
    backend.check = lambda spec, _: [why] if spec.weight_format == "bf16" else []
    skipped = by_status(checks(subject(backend)), "not run")
    assert skipped["shape bf16"] == "weight format: bf16 (needs mxfp4); use torch"


def test_a_result_that_changes_fails_repeatability(subject):
    class Drifts(faulty.Right):
        def compute(self, prepared, x, ids, weights):
            return super().compute(prepared, x, ids, weights) * (1 + 1e-3 * (len(self.calls) % 2))

    failed = by_status(checks(subject(Drifts())), "failed")
    assert re.fullmatch(r"\d of 8 repetitions differ from the first call", failed["repeat 5 tokens"])
    skipped = by_status(checks(subject(Drifts(deterministic=False))), "not run")
    assert skipped["repeat 5 tokens"] == "right does not promise the same bits"


def test_a_workspace_that_is_read_before_it_is_written_fails(subject):
    class Reads(faulty.Right):
        def forward(self, prepared, x, ids, weights, workspace, out, *, max_local_rows):
            super().forward(prepared, x, ids, weights, workspace, out, max_local_rows=max_local_rows)
            out += workspace[0].item() / 255 * out * 0.5

    assert "repeat 5 tokens" in by_status(checks(subject(Reads())), "failed")


def test_rows_lost_between_windows_fail(subject):
    class Loses(faulty.Right):
        def forward(self, prepared, x, ids, weights, workspace, out, *, max_local_rows):
            super().forward(prepared, x, ids, weights, workspace, out, max_local_rows=max_local_rows)
            if max_local_rows < ids.numel():
                out[-1] = 0

    failed = by_status(checks(subject(Loses())), "failed")
    assert set(failed) == {"windows 16 rows", "windows 100 rows"}


def test_an_exception_is_a_failed_check_and_the_set_goes_on(subject):
    found = list(checks(subject(faulty.Raises(RuntimeError("no kernel image")))))
    failed = by_status(found, "failed")
    assert failed["shape typical"] == "RuntimeError: no kernel image"
    assert "raised RuntimeError: no kernel image" in failed["canary spec"]
    assert [c.group for c in found][-1] == "graph"


# --- the command ------------------------------------------------------------------------------------------------------

PLUG_IN = """
import os, time
from portamoe.torch_backend import TorchBackend
class Backend(TorchBackend):
    name, package, priority = "plugged", "plugged", -1
    def forward(self, *args, **kwargs):
        {body}
BACKEND = Backend()
"""


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Return a function that announces a backend whose forward does what the text says."""
    monkeypatch.setenv("PORTAMOE_CACHE_DIR", str(tmp_path / "cache"))

    def install(body):
        site = tmp_path / "site"
        folder = site / "plugged-1.0.dist-info"
        folder.mkdir(parents=True)
        (site / "plugged.py").write_text(PLUG_IN.format(body=body))
        (folder / "METADATA").write_text("Name: plugged\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[portamoe.backends]\nplugged = plugged:BACKEND\n")
        monkeypatch.syspath_prepend(str(site))
        registry.backends.cache_clear()

    yield install
    registry.backends.cache_clear()


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SPEC.to_dict()))
    return str(path)


def test_a_child_that_crashes_is_a_failed_check(plug_in, spec_file, capsys, monkeypatch):
    monkeypatch.setattr(pool, "_CHILDREN", 1)
    plug_in("os.abort()")
    assert main(["verify", "--backend", "plugged", "--device", "cpu", "--spec", spec_file, "--quick"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"plugged canary spec: child process: ended by SIGABRT", text)
    assert re.search(r"plugged process all: 1 children ended early; the checks behind canary spec were not run", text)
    assert re.search(r"^FAILED    0 passed, 1 failed, 1 not run$", text, re.M)


def test_a_child_that_hangs_is_ended(plug_in, spec_file, capsys):
    plug_in("time.sleep(600)")
    command = ["verify", "--backend", "plugged", "--device", "cpu", "--spec", spec_file, "--timeout", "4", "--json"]
    assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    assert [c["status"] for c in report["checks"]] == ["failed"]
    assert report["checks"][0]["detail"].startswith("child process: no end within 4 s")


def test_a_rejected_or_unknown_backend(capsys):
    assert main(["verify", "--backend", "aiter", "--device", "cpu"]) == 1
    assert "backend='aiter' is rejected: device: cpu (needs vendor amd)" in capsys.readouterr().err
    assert main(["verify", "--backend", "nobody", "--device", "cpu"]) == 2
    assert main(["verify", "--bundle", "/nowhere/b.zip", "--device", "cpu"]) == 1


def test_variants_that_are_only_on_request_are_left_out_on_a_cpu_unless_named(monkeypatch):
    slow = Reason("speed", "Triton's interpreter", "a GPU")
    backend = faulty.Right(only_on_request=lambda *_: slow)
    monkeypatch.setattr(registry, "backends", lambda: (backend,))
    ran = []
    monkeypatch.setattr(Pool, "run", lambda self, names, *_, **__: ran.extend(names))
    report = verify.verify(SPEC, device="cpu")
    assert (report["passed"], ran) == (False, [])
    assert report["left_out"][0]["reasons"] == [slow.to_dict()]
    verify.verify(SPEC, device="cpu", backend="right")
    assert ran == ["right"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the whole command once on the CPU with the torch backend: exit code, report and bundle."""
    folder = tmp_path_factory.mktemp("verify")
    path = folder / "small.json"
    path.write_text(json.dumps(replace(SPEC, hidden_size=32, intermediate_size=32).to_dict()))
    target = folder / "bundle.zip"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PORTAMOE_CACHE_DIR", str(folder / "cache"))
        patch.setenv("PORTAMOE_CANARY", "skip")  # must not keep the acceptance from running canaries
        written = []
        patch.setattr("sys.stdout.write", written.append)
        code = main(
            ["verify", "--device", "cpu", "--backend", "torch", "--spec", str(path), "--json", "--bundle", str(target)]
        )
    return code, json.loads("".join(written)), target, folder


def test_the_torch_backend_passes_on_this_machine(run):
    code, report, _, folder = run
    assert code == 0
    assert report["counts"]["failed"] == 0
    assert report["counts"]["passed"] > 70
    assert {c["detail"] for c in report["checks"] if c["status"] == "not run"} == {"graphs need a GPU"}
    assert len(list((folder / "cache/verdicts").glob("torch-cpu-*.json"))) >= len(checklist.ACTIVATIONS)


def test_the_table(run):
    _, report, _, _ = run
    lines = verify.to_text(report).splitlines()
    assert lines[0].startswith("device    cpu (cpu, ")
    assert lines[2] == "backend                check       passed failed not run worst RMS  seconds"
    assert re.fullmatch(r"torch                  canary           1      0       0         -  +\d+\.\d", lines[3])
    assert re.fullmatch(r"torch                  shape           26      0       0   +0\.00\d+  +\d+\.\d", lines[5])
    assert "  torch graph 1 tokens, 33 tokens: graphs need a GPU" in lines
    assert re.fullmatch(r"passed    \d+ passed, 0 failed, 2 not run", lines[-1])


# --- the bundle -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("validate_bundle", ROOT / "scripts/validate_bundle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bundle_is_whole_and_valid(run, script, capsys):
    _, report, target, _ = run
    files = script.read(target)
    assert files["results.json"] == report
    assert len(files["timings.json"]) == 4
    assert len(files["verdicts.json"]) == 1 + len(checklist.ACTIVATIONS)
    assert files["probe.json"]["devices"]
    assert script.main([str(target)]) == 0
    assert "no cell becomes measured: a CPU runs no tiles" in capsys.readouterr().out
    assert [path.name for path in target.parent.glob(".*")] == []


def edited(files, target, **changes):
    """Write a bundle with other files and a manifest that fits them."""
    files = {**files, **changes}
    raw = {name: json.dumps(data).encode() for name, data in files.items() if name != "manifest.json"}
    manifest = files["manifest.json"] | {"files": {n: hashlib.sha256(d).hexdigest() for n, d in raw.items()}}
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in {"manifest.json": json.dumps(manifest).encode(), **raw}.items():
            archive.writestr(name, data)
    return target


def copy_of(value):
    return json.loads(json.dumps(value))


def test_a_file_that_was_edited_is_found(run, script, tmp_path, capsys):
    target = tmp_path / "b.zip"
    with zipfile.ZipFile(run[2]) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b'"tokens": 16', b'"tokens": 17') if name == "timings.json" else data)
    assert script.main([str(target)]) == 1
    assert "timings.json changed since the manifest was written" in capsys.readouterr().err


def spoil(change):
    def apply(files):
        out = copy_of(files)
        change(out)
        return out

    return apply


SPOILT = {
    "schema 99": spoil(lambda f: f["manifest.json"].update(schema=99)),
    "of another device": spoil(lambda f: f["results.json"]["device"].update(arch="gfx90a")),
    "of another run": spoil(lambda f: f["results.json"].update(started="2020-01-01")),
    "uuid of the probe": spoil(lambda f: f["manifest.json"]["device"].update(uuid="GPU-1")),
    "replayed from a recording": spoil(lambda f: f["probe.json"]["host"].update(recorded="folder")),
    "failed checks: torch shape typical": spoil(
        lambda f: next(c for c in f["results.json"]["checks"] if c["case"] == "typical").update(status="failed")
    ),
    "the run ended early": spoil(lambda f: f["results.json"].update(complete=False)),
    "not on cpu": spoil(lambda f: f["verdicts.json"][0]["key"].update(arch="gfx942")),
    "did not pass": spoil(lambda f: f["verdicts.json"][0]["verdict"].update(passed=False)),
    "has torch 1.0": spoil(lambda f: f["verdicts.json"][0]["key"]["versions"].update(torch="1.0")),
    "is not among the results": spoil(lambda f: f["timings.json"][0].update(us=1.5)),
    "modelled": spoil(lambda f: f["timings.json"][0].update(provenance="modelled")),
    "no canary of it passed": spoil(lambda f: f.update({"verdicts.json": []})),
    "not of the expected form": spoil(lambda f: f.update({"timings.json": [{}]})),
}


@pytest.mark.parametrize("message", SPOILT)
def test_what_contradicts_itself_is_refused(run, script, tmp_path, capsys, message):
    target = edited(SPOILT[message](script.read(run[2])), tmp_path / "b.zip")
    assert script.main([str(target)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"no zip"])
def test_no_bundle_at_all(script, tmp_path, content, capsys):
    path = tmp_path / "b.zip"
    path.write_bytes(content)
    assert script.main([str(path)]) == 1
    assert script.main([str(tmp_path / "absent.zip")]) == 1
    assert capsys.readouterr().err.count("invalid:") == 2


@pytest.fixture
def from_lumi(run, script):
    """Make the bundle into one of a GCD of MI250X, with timings of Kimi-K3 through two cells of the table."""
    from portamoe.spec import KIMI_K3

    files = copy_of(script.read(run[2]))
    changes = {"vendor": "amd", "arch": "gfx90a", "name": "AMD Instinct MI250X", "torch_name": "cuda:0"}
    files["manifest.json"]["device"].update(changes)
    files["results.json"]["device"].update(changes)
    next(d for d in files["probe.json"]["devices"] if d["asked"]).update(changes)
    spec = replace(KIMI_K3, local_experts=range(64)).to_dict()
    files["timings.json"] = [
        {"backend": "triton_unfused", "spec": spec, "tokens": tokens, "us": us, "weight_bytes": 10**9, "provenance": p}
        for tokens, us, p in ((1, 1000.0, "measured"), (4096, 9000.0, "measured"))
    ]
    files["results.json"]["checks"] += [
        {"backend": t["backend"], "group": "timing", "case": "", "status": "passed", "detail": "", "figures": t}
        for t in files["timings.json"]
    ]
    for entry in files["verdicts.json"]:
        entry["backend"] = entry["key"]["backend"] = "triton_unfused"
        entry["key"]["arch"] = "gfx90a"
    return files


def test_modelled_cells_become_measured(from_lumi, script, tmp_path, capsys, monkeypatch):
    from rocm_moe import tiles

    own = tmp_path / "rocm_moe" / "tuned"
    own.mkdir(parents=True)
    before = Path(tiles.__file__).parent / "tuned/gfx90a.json"
    (own / "gfx90a.json").write_text(before.read_text())
    monkeypatch.setattr(tiles, "__file__", str(own.parent / "tiles.py"))
    assert script.main([str(edited(from_lumi, tmp_path / "b.zip")), "--write"]) == 0
    out = capsys.readouterr().out
    assert "measured: gfx90a.json cell 0: 1 tokens 1000.0 µs" in out
    old, new = json.loads(before.read_text()), json.loads((own / "gfx90a.json").read_text())
    marked = [i for i, cell in enumerate(new["cells"]) if cell.get("provenance") == "measured"]
    assert marked[0] == 0
    assert 0 < len(marked) < len(new["cells"]) or len(new["cells"]) == len(marked) == 2
    assert new["cells"][0]["device"] == "AMD Instinct MI250X"
    assert new["cells"][0]["timings"] == [{"tokens": 1, "us": 1000.0}]
    assert tiles.read_table(own / "gfx90a.json", "gfx90a").cells == tiles.read_table(before, "gfx90a").cells
    if len(marked) < len(new["cells"]):
        assert new["provenance"] == old["provenance"] != "measured"


def test_cells_stay_modelled_where_other_tiles_were_used(from_lumi, script):
    assert script.measured_cells(from_lumi)[0]
    other = copy_of(from_lumi)
    other["tuned/rocm_moe/gfx90a.json"]["cells"][0]["gemm1"]["warps"] = 16
    assert script.measured_cells(other) == ({}, "the tiles of gfx90a.json changed since the bundle was made")
    other = copy_of(from_lumi)
    other["probe.json"]["host"]["env"]["PORTAMOE_TUNED_DIR"] = "/somewhere"
    assert "PORTAMOE_TUNED_DIR" in script.measured_cells(other)[1]
    other = copy_of(from_lumi)
    other["manifest.json"]["device"]["arch"] = "gfx1101"
    assert "only borrows it" in script.measured_cells(other)[1]


def test_figures_faster_than_the_memory_are_of_another_device(from_lumi, script, tmp_path, capsys):
    assert script.problems(from_lumi) == []
    from_lumi["timings.json"][0]["us"] = 100.0
    from_lumi["results.json"]["checks"][-2]["figures"]["us"] = 100.0
    assert script.problems(from_lumi) == [
        "timing of triton_unfused at 1 tokens: 10.00 TB/s of weights, gfx90a reads 1.64 TB/s"
    ]


def test_an_existing_bundle_is_replaced_only_when_all_is_there(tmp_path, monkeypatch):
    target = tmp_path / "b.zip"
    target.write_text("before")

    def contents(report):
        raise RuntimeError("no probe")

    monkeypatch.setattr(bundle, "contents", contents)
    with pytest.raises(RuntimeError):
        bundle.write(target, {})
    assert target.read_text() == "before"
    with pytest.raises(ValueError, match="is a folder"):
        bundle.checked_target(str(tmp_path))
