"""Plan files: schema, provenance, inheritance, and which kernel a shape gets."""

from __future__ import annotations

import json

import pytest

from cuda_moe.skinny import cute_parameters, registry
from cuda_moe.skinny.parameters import TritonGemv, TritonMma
from cuda_moe.skinny.plan import KERNELS, LEAST_GAIN, PLANS, Choice, PlanError, load_plan, parse, read_plan
from cuda_moe.skinny.provider import PROVIDER
from tests.host_recordings import device, recorded

FILES = sorted(PLANS.glob("*.json"))
RUBIN = "rubin-flashinfer-0.7.2"
#: Shapes that Kimi-K3 uses and the plans must answer for.
KIMI = ((3584, 7168), (7168, 3584))


def minimal(**changes):
    entry = {
        "tokens": [1, 4],
        "torch_us": 12.0,
        "choices": [{"kernel": "triton_gemv", "parameters": {"rows": 2, "warps": 4, "unroll": 1}, "us": 9.0}],
    }
    plan = {
        "schema": 1,
        "arch": "sm90",
        "origin": "measured",
        "device": "a GPU",
        "date": "2026-01-01",
        "command": "portamoe bench --gemm --tune",
        "projections": [{"n": 1536, "k": 7168, "entries": [entry]}],
    }
    entry |= changes.pop("entry", {})
    return plan | changes


def write(folder, plan, name="linear-sm90.json"):
    path = folder / name
    path.write_text(json.dumps(plan), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_packaged_files_follow_the_schema(path):
    plan = read_plan(path)
    assert plan.arch == path.stem
    assert plan.entries
    for entries in plan.entries.values():
        for entry in entries:
            assert {choice.kernel for choice in entry.choices} <= set(KERNELS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kimi_k3s_latent_projections_are_planned(path):
    assert set(KIMI) <= set(read_plan(path).entries)


def test_measured_entries_beat_torch_by_the_least_gain():
    plan = load_plan((9, 0), {})
    assert plan.origin == "measured"
    assert plan.about["device"] == "NVIDIA H200"
    for entries in plan.entries.values():
        for entry in entries:
            for choice in (*entry.choices, *entry.dependent):
                assert choice.us * LEAST_GAIN <= (choice.torch_us or entry.torch_us)


def test_rubin_inherits_the_winners_of_sm103_and_says_so():
    rubin, b300 = load_plan((10, 7), {}), load_plan((10, 3), {})
    assert rubin.entries == b300.entries
    assert (rubin.inherits, rubin.origin) == ("sm103", "unmeasured")
    assert rubin.line() == "sm107 uses sm103's winners: inherited, unmeasured"


def test_no_plan_for_other_devices():
    assert load_plan((8, 0), {}) is None
    assert load_plan((12, 0), {}) is None


def test_resolve_takes_the_first_choice_that_can_run_and_torch_where_there_is_none(tmp_path):
    choices = [
        {"kernel": "cute_gemv", "parameters": {"threads": 224}, "us": 8.0},
        {"kernel": "triton_gemv", "parameters": {"rows": 2}, "us": 9.0},
    ]
    plan = read_plan(write(tmp_path, minimal(entry={"tokens": [2, 3], "choices": choices})))
    both = plan.resolve(1536, 7168, lambda kernel: True)
    assert [c.kernel if c else None for c in both[:4]] == [None, "cute_gemv", "cute_gemv", None]
    assert len(both) == 16
    triton = plan.resolve(1536, 7168, lambda kernel: kernel.startswith("triton"))
    assert triton[1].parameters == TritonGemv(rows=2)
    assert plan.resolve(1536, 7168, lambda kernel: False) == (None,) * 16
    assert plan.resolve(1537, 7168, lambda kernel: True) == (None,) * 16


def test_dependent_launches_may_have_a_kernel_of_their_own(tmp_path):
    own = {"kernel": "cute_gemv", "parameters": {"threads": 224}, "us": 11.0, "torch_us": 13.0}
    plan = read_plan(write(tmp_path, minimal(entry={"dependent": [own]})))
    assert plan.resolve(1536, 7168, lambda kernel: True)[0].kernel == "triton_gemv"
    assert plan.resolve(1536, 7168, lambda kernel: True, dependent=True)[0].kernel == "cute_gemv"
    without = plan.resolve(1536, 7168, lambda kernel: kernel.startswith("triton"), dependent=True)
    assert without[0] is None
    with pytest.raises(PlanError, match="must beat torch"):  # by its own run's torch_us
        read_plan(write(tmp_path, minimal(entry={"dependent": [own | {"torch_us": 11.1}]})))


def test_a_tuned_folder_goes_before_the_packaged_plan(tmp_path):
    write(tmp_path, minimal(device="another GPU"))
    environ = {"PORTAMOE_TUNED_DIR": str(tmp_path)}
    assert load_plan((9, 0), environ).about["device"] == "another GPU"
    assert load_plan((10, 3), environ).arch == "sm103"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "schema 2"),
        ({"origin": "guessed"}, "origin 'guessed'"),
        ({"date": ""}, "does not say date"),
        ({"origin": "published"}, "does not say source"),
        ({"inherits": "sm103"}, "a plan that inherits"),
        ({"entry": {"tokens": [0, 4]}}, "rows ascend"),
        ({"entry": {"tokens": [1, 17]}}, "rows ascend"),
        ({"entry": {"choices": []}}, "no choice"),
        ({"entry": {"torch_us": 9.3}}, "must beat torch by 5%"),
        ({"entry": {"choices": [{"kernel": "triton_gemv", "parameters": {"row": 2}, "us": 9.0}]}}, "row"),
        ({"entry": {"choices": [{"kernel": "gemv", "parameters": {}, "us": 9.0}]}}, "unknown kernel 'gemv'"),
        ({"entry": {"choices": [{"kernel": "triton_gemv", "parameters": {"rows": 3}, "us": 9.0}]}}, "rows=3"),
        ({"projections": 3}, "TypeError"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_fault(tmp_path, changes, words):
    path = write(tmp_path, minimal(**changes))
    with pytest.raises(PlanError) as error:
        read_plan(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_a_shape_twice_and_overlapping_rows_are_refused(tmp_path):
    plan = minimal()
    plan["projections"] *= 2
    with pytest.raises(PlanError, match="listed twice"):
        read_plan(write(tmp_path, plan))
    plan = minimal()
    plan["projections"][0]["entries"] *= 2
    with pytest.raises(PlanError, match="without overlap"):
        read_plan(write(tmp_path, plan))


@pytest.mark.parametrize(
    ("tile", "shape", "words"),
    [
        (TritonGemv(8, 4, 4), (1536, 7168, 4), "fewer rows"),
        (TritonGemv(), (1536, 7168, 17), "use torch"),
        (TritonGemv(), (1536, 24, 1), "multiple of 16"),
        (TritonMma(32, 8, 128, 8), (1536, 7168, 8), "shared memory"),
        (TritonMma(16, 4, 64, 4, 8), (1536, 1024, 8), "split less"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(tile, shape, words):
    with pytest.raises(ValueError, match=words):
        tile.check(*shape)


def test_parse_returns_the_parameters_of_every_implementation():
    assert parse("triton_mma", {"rows": 32}) == TritonMma(rows=32)
    assert parse("cute_mma", {"warps": 4}) == cute_parameters.MmaParameters(warps=4)


def test_kernels_are_refused_where_they_cannot_run():
    assert registry.reason("triton_gemv", device("amd", "gfx90a")).limit == "an NVIDIA GPU"
    assert registry.reason("triton_gemv", device("nvidia", "sm_90")).value == "not installed"
    with_triton = device("nvidia", "sm_90", vendor={"triton": "3.6.0"})
    assert registry.reason("triton_gemv", with_triton) is None
    assert registry.reason("other", with_triton).value == "other"


def test_what_is_not_listed_for_dependent_launches_is_launched_ordinarily(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    write(tmp_path, minimal())
    monkeypatch.setenv("PORTAMOE_TUNED_DIR", str(tmp_path))
    given = []
    monkeypatch.setattr(registry, "bind", lambda *a: lambda *b, pdl=False: given.append(pdl))
    table = PROVIDER.table(1536, 7168, device("nvidia", "sm_90", vendor={"triton": "3.6.0"}))
    table.kernel(1, pdl=True)(None, None, None, pdl=True)
    assert given == [False]
    assert table.kernel(5, pdl=True) is None


def test_outside_a_capture_a_dependent_cutedsl_launch_is_prepared_and_made_ordinarily(monkeypatch):
    torch = pytest.importorskip("torch")
    from cuda_moe.skinny import cute_launch

    warmed, launched = [], []
    monkeypatch.setattr(cute_launch, "warm_up", lambda entries, device: warmed.extend(entries))
    monkeypatch.setattr(cute_launch, "launch", lambda *a, pdl, **p: launched.append(pdl))
    choice = Choice("cute_gemv", cute_parameters.GemvParameters(threads=224))
    call = registry.bind(choice, 1536, 7168, 1, torch.device("cuda", 0))
    x = torch.zeros(1, 7168)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call(x, None, None, None, pdl=True)
    call(x, None, None, None, pdl=True)
    assert launched == [False, False]
    assert {(entry["pdl"], entry["residual"], entry["m"]) for entry in warmed} == {(True, False, 1)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(x, None, None, None, pdl=True)
    assert launched[-1] is True


def test_a_recorded_host_is_asked_for_its_own_cutedsl():
    rubin = recorded(RUBIN).devices[0]
    assert registry.reason("cute_mma", rubin) is None
    h200 = recorded("h200").devices[0]
    assert registry.reason("cute_mma", h200).value == "not installed"
