"""`portamoe run`: from a checkpoint to checked outputs, and clear errors that leave nothing half-done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from portamoe import cli
from portamoe.testing import assert_close


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main(["run", *map(str, arguments)])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def base(kimi):
    return ("--checkpoint", kimi.checkpoint, "--layer", kimi.layer, "--backend", "torch", "--device", "cpu")


def changed(kimi, path: Path, **tensors) -> Path:
    """Write the data set's inputs with some tensors replaced (None: left out)."""
    values = {k: v for k, v in load_file(kimi.expected).items() if k in {"x", "topk_ids", "topk_weights", "y_ref"}}
    values |= tensors
    save_file({k: v.contiguous() for k, v in values.items() if v is not None}, path)
    return path


# --- what it does -----------------------------------------------------------------------------------------------------


def test_data_sets_pass_their_expected_values(data_set, run, tmp_path):
    output = tmp_path / "y.safetensors"
    code, out, err = run(
        "--checkpoint", data_set.checkpoint, "--layer", data_set.layer, "--backend", "torch", "--device", "cpu",
        "--input", data_set.expected, "--expected", data_set.expected, "--check", "--output", output,
    )  # fmt: skip
    assert code == 0, err
    assert out.count("passed") == 2
    tensors = load_file(output)
    assert list(tensors) == ["y"]
    assert tensors["y"].dtype == torch.bfloat16
    assert_close(tensors["y"], load_file(data_set.expected)["y_ref"], roundings=1)


def test_the_report_holds_time_bytes_memory_and_error(base, run):
    code, out, _ = run(*base, "--check")
    assert code == 0
    lines = {line[:10].strip(): line[12:] for line in out.splitlines()}
    assert "mxfp4, H 256, I 192, experts 0:16 of 16, top-4" in lines["checkpoint"]
    assert lines["device"].startswith("cpu")
    assert lines["backend"].startswith("torch (portamoe): asked for by backend='torch'")
    assert "weights 1.25 MB, workspace" in lines["prepare"]
    assert "16 tokens, 16 experts hit (1.25 MB)" in lines["call"]
    assert "ms, median of" in lines["call"]
    assert "peak resident" in lines["memory"]
    assert "relative RMS 0.00" in lines["check"]


def test_drawn_inputs_depend_on_the_seed_alone(base, run, tmp_path):
    results = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(*base, "--tokens", 5, "--seed", seed, "--output", tmp_path / name)[0] == 0
        results.append(load_file(tmp_path / name)["y"])
    assert results[0].shape == (5, 256)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_drawn_inputs_saturate_the_activation(kimi):
    from portamoe.cli.run import _x_std
    from portamoe.reference import dequantized

    spec, source, _ = kimi.load()
    std = _x_std(spec, source.expert(0))
    w13, _ = dequantized(source.expert(3))
    x = torch.randn(64, spec.hidden_size, dtype=torch.float64) * std
    gate, up = (x @ w13.T).chunk(2, dim=1)
    assert 4 <= gate.std() < 200
    assert 25 <= up.std() < 200


def test_a_rank_computes_its_experts_only(base, run, kimi, tmp_path):
    total = 0
    for first, last in ((0, 5), (5, 16)):
        output = tmp_path / f"{first}"
        arguments = (*base, "--input", kimi.expected, "--check", "--output", output)
        code, out, err = run(*arguments, "--experts", f"{first}:{last}")
        assert code == 0, err
        assert f"experts {first}:{last} of 16" in out
        total = total + load_file(output)["y"].float()
    # Two results rounded apart: the cancellation between them costs a little.
    assert_close(total, load_file(kimi.expected)["y_ref"], roundings=4)


def test_minus_one_in_the_input_is_not_on_this_rank(base, run, kimi, tmp_path):
    ids = load_file(kimi.expected)["topk_ids"]
    ids[0] = -1
    path = changed(kimi, tmp_path / "in", topk_ids=ids, y_ref=None)
    code, _, err = run(*base, "--input", path, "--check", "--output", tmp_path / "y")
    assert code == 0, err
    assert not load_file(tmp_path / "y")["y"][0].any()


def test_no_tokens(base, run, tmp_path):
    code, out, err = run(*base, "--tokens", 0, "--check", "--output", tmp_path / "y")
    assert code == 0, err
    assert "0 tokens, 0 experts hit" in out
    assert load_file(tmp_path / "y")["y"].shape == (0, 256)


@pytest.mark.parametrize("name", ["y_if_silu", "y_if_w3w1", "y_if_high_nibble_first"])
def test_a_result_beyond_the_tolerance_is_exit_code_1(base, run, kimi, tmp_path, name):
    wrong = load_file(kimi.expected)[name]
    path = changed(kimi, tmp_path / "wrong", y_ref=wrong)
    code, out, err = run(*base, "--input", kimi.expected, "--expected", path)
    assert code == 1
    assert "FAILED against y_ref" in out
    assert err == "portamoe: the result is beyond the tolerance\n"


def test_nan_in_a_token_stays_there(base, run, kimi, tmp_path):
    x = load_file(kimi.expected)["x"]
    x[3, 3] = torch.nan
    path = changed(kimi, tmp_path / "in", x=x)
    code, out, _ = run(*base, "--input", path, "--check", "--output", tmp_path / "y")
    assert code == 0
    assert "256 not finite" in out
    assert load_file(tmp_path / "y")["y"].isnan().any(1).tolist() == [t == 3 for t in range(9)]


# --- bad input --------------------------------------------------------------------------------------------------------


BAD_TENSORS = {
    "x of another width": ({"x": torch.zeros(9, 128, dtype=torch.bfloat16)}, "x is torch.bfloat16 [9, 128]"),
    "x in float32": ({"x": torch.zeros(9, 256)}, "x is torch.float32 [9, 256], expected torch.bfloat16 [9, 256]"),
    "x of one dimension": ({"x": torch.zeros(256, dtype=torch.bfloat16)}, "x is torch.bfloat16 [256]"),
    "ids in int64": ({"topk_ids": torch.zeros(9, 4, dtype=torch.int64)}, "topk_ids is torch.int64 [9, 4]"),
    "ids of another top-k": ({"topk_ids": torch.zeros(9, 3, dtype=torch.int32)}, "expected torch.int32 [9, 4]"),
    "weights in float64": ({"topk_weights": torch.zeros(9, 4, dtype=torch.float64)}, "topk_weights is torch.float64"),
    "no weights": ({"topk_weights": None}, "lacks topk_weights; it holds topk_ids, x"),
    "an id too large": ({"topk_ids": torch.full((9, 4), 16, dtype=torch.int32)}, "topk_ids[0, 0] is 16"),
    "an id below -1": ({"topk_ids": torch.full((9, 4), -2, dtype=torch.int32)}, "expected -1 or 0 … 15"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_named(base, run, kimi, tmp_path, name):
    tensors, message = BAD_TENSORS[name]
    path = changed(kimi, tmp_path / "in", **{"y_ref": None, **tensors})
    output = tmp_path / "y"
    code, _, err = run(*base, "--input", path, "--output", output)
    assert code == 2
    assert message in err
    assert err.startswith("portamoe: ")
    assert err.count("\n") == 1
    assert not output.exists()


BAD_USAGE = {
    "input and tokens": (("--input", "F", "--tokens", "3"), "give one or the other"),
    "expected without input": (("--expected", "F"), "--expected needs the --input"),
    "negative tokens": (("--tokens", "-1"), "--tokens must be at least 0"),
    "experts that are no range": (("--experts", "4"), "expected LO:HI"),
    "experts that are empty": (("--experts", "4:4"), "expected LO:HI with LO < HI"),
    "experts beyond the last": (("--experts", "8:17"), "within 0:16"),
    "an unknown backend": (("--backend", "best"), "unknown backend 'best'; known: "),
    "an unknown device": (("--device", "cuda:77"), "no device 'cuda:77'; visible here: "),
    "a layer that is dense": (("--layer", "0"), "0"),
    "a layer that is not there": (("--layer", "7"), "7"),
    "a folder that is not there": (("--checkpoint", "/nowhere"), "/nowhere is no folder"),
    "an input that is not there": (("--input", "/nowhere"), "/nowhere is no file"),
    "a layer that is no number": (("--layer", "x"), "invalid int value"),
}


@pytest.mark.parametrize("name", BAD_USAGE)
def test_bad_usage_is_exit_code_2_with_one_message(base, run, name):
    arguments, message = BAD_USAGE[name]
    code, out, err = run(*base, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_files_that_are_no_safetensors(base, run, tmp_path):
    path = tmp_path / "in"
    for content in (b"", b"text", b"\xff" * 64):
        path.write_bytes(content)
        code, _, err = run(*base, "--input", path)
        assert code == 2
        assert "no readable safetensors file" in err


def test_an_expected_file_that_does_not_fit_is_found_before_the_run(base, run, kimi, tmp_path):
    path = changed(kimi, tmp_path / "e", y_ref=torch.zeros(8, 256))
    code, out, err = run(*base, "--input", kimi.expected, "--expected", path)
    assert code == 2
    assert "y_ref is torch.float32 [8, 256], expected a float dtype and [9, 256]" in err
    assert not out


# --- the output file --------------------------------------------------------------------------------------------------


def test_an_existing_output_is_replaced_whole(base, run, tmp_path):
    output = tmp_path / "y"
    output.write_text("before")
    assert run(*base, "--output", output)[0] == 0
    assert load_file(output)["y"].shape == (16, 256)
    assert [p.name for p in tmp_path.iterdir()] == ["y"]


def test_a_failing_write_leaves_the_existing_file(base, run, tmp_path, monkeypatch):
    output = tmp_path / "y"
    output.write_text("before")

    def full_disk(tensors, filename):
        Path(filename).write_text("half")
        raise OSError(28, "No space left on device", filename)

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    code, _, err = run(*base, "--output", output)
    assert code == 1
    assert "No space left" in err
    assert output.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["y"]


def test_a_link_keeps_being_a_link(base, run, tmp_path):
    (tmp_path / "target").write_text("before")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert run(*base, "--output", link)[0] == 0
    assert link.is_symlink()
    assert "y" in load_file(tmp_path / "target")


def test_places_that_cannot_be_written_are_found_before_the_run(base, run, tmp_path, monkeypatch):
    code, out, err = run(*base, "--output", tmp_path / "nowhere" / "y")
    assert (code, out) == (1, "")
    assert "is no folder" in err
    code, out, err = run(*base, "--output", "/dev/null")
    assert (code, out) == (2, "")
    assert "no regular file" in err
    assert Path("/dev/null").is_char_device()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    code, out, err = run(*base, "--output", tmp_path / "y")
    assert (code, out) == (1, "")
    assert "cannot be written" in err


def test_out_of_memory_is_one_message(base, run, monkeypatch):
    def allocate(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.00 GiB.\nmore lines")

    monkeypatch.setattr("portamoe.layer.RoutedExperts.forward", allocate)
    code, _, err = run(*base)
    assert code == 1
    assert err.startswith("portamoe: out of memory: CUDA out of memory. Tried to allocate 15.00 GiB.; take fewer")


def test_as_a_command(kimi):
    import portamoe

    environment = os.environ | {"PYTHONPATH": str(Path(portamoe.__file__).parents[1])}
    done = subprocess.run(
        [
            sys.executable, "-m", "portamoe", "run", "--checkpoint", kimi.checkpoint, "--layer", "1", "--backend",
            "torch", "--device", "cpu", "--input", kimi.expected, "--expected", kimi.expected,
        ],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "passed against y_ref" in done.stdout
    assert not done.stderr
