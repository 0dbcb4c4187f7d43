"""`portamoe probe`: output, exit codes, and one message instead of a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from portamoe.cli import CliError, main
from tests.host_recordings import HOSTS

ROOT = Path(__file__).parent.parent
LUMI = str(HOSTS / "lumi-g")
MI355X = str(HOSTS / "mi355x-aiter-0.1.20")


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch):
    monkeypatch.delenv("PORTAMOE_BACKEND", raising=False)


@pytest.fixture
def run(capsys):
    """Return a function that runs the command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse
            code = error.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_text(run):
    code, out, err = run("probe", "capabilities", "--root", LUMI)
    assert (code, err) == (0, "")
    assert out.startswith("host\n")
    assert "gfx90a" in out


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--json", "--spec", "gpt-oss")])
def test_probe_alone_means_capabilities(run, arguments):
    assert run("probe", *arguments, "--root", LUMI) == run("probe", "capabilities", *arguments, "--root", LUMI)


def test_json_is_one_object_and_nothing_else(run):
    code, out, err = run("probe", "--json", "--root", MI355X)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert list(report) == ["schema", "host", "devices", "toolchain", "backends", "selected", "note", "projections"]
    assert report["selected"] == "aiter"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--backend", "torch"), 0),
        (("--require", "torch"), 0),
        (("--backend", "aiter"), 1),
        (("--require", "aiter"), 1),
        (("--backend", "torch", "--require", "aiter"), 1),
        (("--require", "aiter", "--spec", "gpt-oss"), 1),
    ],
)
def test_backend_and_require(run, arguments, code):
    for form in ((), ("--json",)):
        result, out, err = run("probe", *arguments, *form, "--root", LUMI)
        assert (result, err) == (code, "")
        assert "triton_unfused" in out  # the report is there all the same, with the remedy
    assert run("probe", "--require", "aiter", "--root", MI355X)[0] == 0


def test_backend_is_what_is_selected(run):
    assert json.loads(run("probe", "--json", "--backend", "torch", "--root", MI355X)[1])["selected"] == "torch"
    assert json.loads(run("probe", "--json", "--backend", "aiter", "--root", LUMI)[1])["selected"] is None
    assert json.loads(run("probe", "--json", "--require", "torch", "--root", MI355X)[1])["selected"] == "aiter"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "COMMAND"),
        (("nonsense",), 2, "invalid choice"),
        (("probe", "--nonsense"), 2, "unrecognized arguments"),
        (("probe", "nonsense"), 2, "invalid choice"),
        (("probe", "capabilities", "somewhere"), 2, "did you mean --root somewhere?"),
        (("probe", "record"), 2, "needs the folder"),
        (("probe", "--backend", "x"), 2, "unknown backend 'x'; known: "),
        (("probe", "--require", "x"), 2, "unknown backend 'x'; known: "),
        (("probe", "--device", "cuda:99"), 2, "no device 'cuda:99'"),
        (("probe", "--spec", "kimi-k9"), 2, "neither a preset (kimi-k3, "),
        (("probe", "--deep", "--root", LUMI), 2, "cannot replay"),
        (("probe", "--root", "/nonexistent"), 3, "is no recording"),
    ],
)
def test_errors_are_one_message(run, arguments, code, message):
    result, out, err = run(*arguments)
    assert result == code
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_damaged_recording_is_exit_code_3(run, tmp_path):
    (tmp_path / "host.json").write_text('{"schema": 99}')
    code, out, err = run("probe", "--json", "--root", str(tmp_path))
    assert (code, out) == (3, "")
    assert err == f"portamoe: {tmp_path}/host.json has schema 99, this version reads 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object"),
        ('{"hidden_size": 64}', "spec lacks"),
        (
            '{"hidden_size": 64, "intermediate_size": 64, "num_experts": 4, "top_k": 8,'
            ' "activation": {"name": "situ", "beta": 4.0}}',
            "top_k 8 exceeds num_experts 4",
        ),
    ],
)
def test_a_bad_spec_file(run, tmp_path, text, message):
    (tmp_path / "spec.json").write_text(text)
    code, out, err = run("probe", "--spec", str(tmp_path / "spec.json"), "--root", LUMI)
    assert (code, out) == (2, "")
    assert message in err


def test_a_spec_file_is_asked(run, tmp_path):
    from portamoe.spec import KIMI_K3

    spec = KIMI_K3.to_dict() | {"weight_format": "nvfp4"}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    report = json.loads(run("probe", "--json", "--spec", str(tmp_path / "spec.json"), "--root", MI355X)[1])
    assert report["selected"] != "aiter"


NOTES = {
    ("h200", "bf16"): "are served as MXFP4 by triton_fused, with the same values",
    ("h200", "nvfp4"): 'would be served as MXFP4 by triton_fused with activation_format="bf16"',
    ("lumi-g", "bf16"): "are served as MXFP4 by triton_unfused, with the same values",
    ("rubin-flashinfer-0.7.2", "nvfp4"): None,
    ("cpu-only", "bf16"): None,
}


@pytest.mark.parametrize(("host", "activations"), NOTES)
def test_what_becomes_of_nvfp4_weights_is_said(run, tmp_path, host, activations):
    """A layer converts a recode back where no fast backend takes NVFP4: the probe must not suggest torch is all."""
    from portamoe.spec import KIMI_K3

    spec, root = tmp_path / "spec.json", str(HOSTS / host)
    spec.write_text(json.dumps(KIMI_K3.to_dict() | {"weight_format": "nvfp4", "activation_format": activations}))
    note = NOTES[host, activations]
    found = json.loads(run("probe", "--json", "--spec", str(spec), "--root", root)[1])["note"]
    text = run("probe", "--spec", str(spec), "--root", root)[1]
    assert (found is None) if note is None else found.endswith(note)
    assert (found or "selected\n") in text
    assert json.loads(run("probe", "--json", "--root", root)[1])["note"] is None


def test_record_and_replay(run, tmp_path):
    folder = tmp_path / "here"
    code, out, err = run("probe", "record", str(folder))
    assert (code, out, err) == (0, f"recorded to {folder}\n", "")
    report = json.loads(run("probe", "--json", "--root", str(folder))[1])
    assert report["host"]["recorded"] == str(folder)
    assert report["host"]["live"] == []
    code, out, err = run("probe", "record", str(folder))
    assert (code, out) == (1, "")
    assert "already there" in err


def test_replay_says_what_it_took_from_here(run, tmp_path):
    shutil.copytree(HOSTS / "lumi-g/sys", tmp_path / "sys")
    out = run("probe", "--root", str(tmp_path))[1]
    assert "not in the recording, taken from this machine: machine, python, env, torch, distributions" in out


def test_a_command_may_choose_its_exit_code(run, monkeypatch):
    from portamoe.cli import probe

    def fail(_):
        raise CliError("above the tolerance", code=7)

    monkeypatch.setattr(probe, "execute", fail)
    assert run("probe") == (7, "", "portamoe: above the tolerance\n")


def test_a_fault_of_this_library_keeps_its_traceback(monkeypatch):
    from portamoe.cli import probe

    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr(probe, "execute", fail)
    with pytest.raises(ZeroDivisionError):
        main(["probe"])


def process(*arguments: str, cwd: Path | None = None, **streams: int) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/common{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-m", "portamoe", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=env, text=True, timeout=120, stderr=subprocess.PIPE, check=False,
        **{"stdout": subprocess.PIPE, **streams},
    )  # fmt: skip


def test_the_module_runs_beside_a_users_own_common(tmp_path):
    (tmp_path / "common.py").write_text("raise RuntimeError('imported')")
    child = process("probe", "--json", cwd=tmp_path)
    assert (child.returncode, child.stderr) == (0, "")
    assert json.loads(child.stdout)["selected"] == "torch"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_text_that_the_terminal_cannot_show(monkeypatch, encoding):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    monkeypatch.setenv("TRITON_CACHE_DIR", os.fsdecode(b"/cach\xe9"))
    child = process("probe")
    assert (child.returncode, child.stderr) == (0, "")
    assert "TRITON_CACHE_DIR=/cach\\udce9" in child.stdout


def test_a_reader_that_goes_away_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        child = process("probe", "--root", LUMI, stdout=writing)
    finally:
        os.close(writing)
    assert child.stderr == ""
    assert child.returncode == 141


def test_a_closed_stdout_leaves_the_exit_code():
    module = f"{sys.executable} -m portamoe probe --root {LUMI}"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/common{os.pathsep}{ROOT}"}
    for wish, code in (("", 0), (" --require aiter", 1)):
        command = ["sh", "-c", f"{module}{wish} >&-"]
        child = subprocess.run(command, env=env, text=True, timeout=120, stderr=subprocess.PIPE, check=False)
        assert child.returncode == code
        assert "Traceback" not in child.stderr


def test_a_full_disk_is_said():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w") as full:
        child = process("probe", "--root", LUMI, stdout=full.fileno())
    assert child.returncode == 1
    assert "No space left" in child.stderr
    assert "Traceback" not in child.stderr
