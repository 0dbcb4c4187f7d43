"""The Dockerfiles against versions.json, the bake file and what every image promises; no container tool is needed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
VERSIONS = json.loads((DOCKER / "versions.json").read_text(encoding="utf-8"))
LABELS = ["title", "description", "licenses", "version", "revision", "created", "base.name", "base.digest"]

each = pytest.mark.parametrize("name", sorted(VERSIONS))


def instructions(name: str) -> list[tuple[str, str]]:
    """Return (INSTRUCTION, rest) of a Dockerfile, continuation lines joined."""
    lines = (DOCKER / f"Dockerfile.{name}").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", text)
    return [(word, rest) for line in joined.splitlines() if line.strip() for word, _, rest in [line.partition(" ")]]


def last_stage(name: str) -> list[tuple[str, str]]:
    found = instructions(name)
    start = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


def test_every_dockerfile_has_versions_and_only_those() -> None:
    assert {path.suffix[1:] for path in DOCKER.glob("Dockerfile.*")} == set(VERSIONS)


@each
def test_args_and_versions_agree(name: str) -> None:
    args = [rest for word, rest in instructions(name) if word == "ARG"]
    defaults = dict(arg.split("=", 1) for arg in args if "=" in arg)
    assert defaults == VERSIONS[name]
    assert len([arg for arg in args if "=" in arg]) == len(defaults), "an ARG has two defaults"
    # A default given before the first FROM is taken over by naming the ARG again.
    assert {arg for arg in args if "=" not in arg} <= {"BASE_IMAGE", "BASE_DIGEST"}


@each
def test_base_is_an_arg_with_an_optional_digest(name: str) -> None:
    images = [rest.split()[0] for word, rest in instructions(name) if word == "FROM"]
    assert images[0] == "${BASE_IMAGE}${BASE_DIGEST:+@${BASE_DIGEST}}"
    assert set(images[1:]) <= {"base", "install"}
    assert re.fullmatch(r"docker\.io/[a-z0-9/-]+:[\w.-]+", VERSIONS[name]["BASE_IMAGE"])
    assert not VERSIONS[name]["BASE_IMAGE"].endswith(":latest")
    assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", VERSIONS[name]["BASE_DIGEST"])


@each
def test_labels_say_version_and_base(name: str) -> None:
    labels = " ".join(rest for word, rest in last_stage(name) if word == "LABEL")
    for label in LABELS:
        assert f"org.opencontainers.image.{label}=" in labels
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert VERSIONS[name]["VERSION"] == project["version"]
    assert f'licenses="{project["license"]}"' in labels


@each
def test_image_starts_as_a_numeric_user_through_the_entrypoint(name: str) -> None:
    stage = dict(last_stage(name))  # the last of each instruction
    user, _, group = stage["USER"].partition(":")
    assert user.isdigit()
    assert int(user) > 0
    assert group.isdigit()
    assert json.loads(stage["ENTRYPOINT"]) == ["/opt/portamoe/entrypoint.sh"]
    _, _, command = stage["HEALTHCHECK"].partition("CMD ")
    assert json.loads(command)[:3] == ["/opt/portamoe/entrypoint.sh", "probe", "capabilities"]


@each
def test_nothing_lives_in_roots_home_and_no_secret_or_host_enters(name: str) -> None:
    text = (DOCKER / f"Dockerfile.{name}").read_text(encoding="utf-8")
    assert "/root" not in text
    assert not re.search(r"PIP_CERT|find-links|trusted-host|proxy", text, re.IGNORECASE)
    hosts = set(re.findall(r"https?://([^/\s]+)", text))
    assert hosts <= {"download.pytorch.org"}


@each
def test_no_line_installs_torch_over_a_base(name: str) -> None:
    runs = [rest for word, rest in instructions(name) if word == "RUN"]
    assert not [run for run in runs if re.search(r"pip3? install", run)], "install.py is the one that installs"
    assert len([run for run in runs if "install.py /wheels" in run]) == 1
    assert not any("aiter" in run for run in runs), "AITER cannot be imported while building, and PyPI's is a stranger"


def test_rocm_builds_for_gfx90a_and_checks_it() -> None:
    runs = " ".join(rest for word, rest in last_stage("rocm") if word == "RUN")
    assert VERSIONS["rocm"]["ROCM_ARCH"] == "gfx90a"
    assert "check_base.py rocm" in runs
    assert "--torch" not in " ".join(rest for word, rest in instructions("rocm") if word == "RUN")


def test_cuda_is_new_enough_for_sm107_and_sets_both_ptxas_variables() -> None:
    release = re.search(r"cuda:(\d+)\.(\d+)[\d.]*-devel", VERSIONS["cuda"]["BASE_IMAGE"])
    assert release is not None
    assert (int(release[1]), int(release[2])) >= (13, 4)
    stage = last_stage("cuda")
    assert VERSIONS["cuda"]["CUDA_CAPABILITY"] == "10.7"
    assert any("check_base.py cuda" in rest and "--ptxas" in rest for word, rest in stage if word == "RUN")
    env = " ".join(rest for word, rest in stage if word == "ENV")
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        assert f"{variable}=/usr/local/cuda/bin/ptxas" in env


def test_bake_has_one_target_for_each_dockerfile() -> None:
    text = (DOCKER / "docker-bake.hcl").read_text(encoding="utf-8")
    files = re.findall(r'dockerfile = "docker/Dockerfile\.(\w+)"', text)
    assert sorted(files) == sorted(VERSIONS)
    platforms = dict(re.findall(r'Dockerfile\.(\w+)"\n.*\n +platforms +=\ \[(.*)\]', text))
    assert platforms["cuda"] == '"linux/amd64", "linux/arm64"'
    assert platforms["rocm"] == '"linux/amd64"'


def test_dockerignore_allows_what_is_copied_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = set()
    for name in VERSIONS:
        for word, rest in instructions(name):
            if word == "COPY" and "--from" not in rest:
                copied |= {part for part in rest.split()[:-1] if not part.startswith("--")}
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)


def test_readme_names_every_arg() -> None:
    text = (DOCKER / "README.md").read_text(encoding="utf-8")
    for name in VERSIONS:
        for arg in VERSIONS[name]:
            assert f"`{arg}`" in text
        assert f"Dockerfile.{name}" in text
