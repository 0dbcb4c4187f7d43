"""compare_contract.py itself: it finds nothing wrong with the stand-in's tree, and finds what is wrong."""

import pytest

from tests.aiter import compare_contract, trees


@pytest.fixture
def report():
    return compare_contract.Report()


@pytest.mark.parametrize("version", trees.VERSIONS)
def test_recorded_trees_agree(tmp_path, report, version, capsys):
    root = trees.amd_tree(tmp_path, version)
    compare_contract.compare_signatures(root, version, report)
    compare_contract.compare_enums(root, version, report)
    assert not report.differs, capsys.readouterr().out


def test_a_new_parameter_and_another_default_are_found(tmp_path, report, capsys):
    root = trees.amd_tree(tmp_path, "0.1.20")
    source = root / "fused_moe.py"
    source.write_text(source.read_text().replace("splitk=0", "splitk=1, quant_dtype_a=None"))
    compare_contract.compare_signatures(root, "0.1.20", report)
    assert report.differs
    text = capsys.readouterr().out
    assert "quant_dtype_a: None, assumed absent" in text
    assert "splitk: 1, assumed 0" in text


def test_a_call_is_compared_with_the_stand_in_and_the_reference(install, report, capsys):
    install("0.1.20")
    compare_contract.compare_run("cpu", report)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert not report.differs, lines
