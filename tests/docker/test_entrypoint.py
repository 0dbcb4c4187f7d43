"""What the entrypoint runs, and which folders and messages it leaves, with a stand-in for portamoe."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from portamoe.cli import COMMANDS

SCRIPT = Path(__file__).resolve().parents[2] / "docker/entrypoint.sh"
CACHES = (
    "PORTAMOE_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "MIOPEN_USER_DB_PATH",
    "MIOPEN_CUSTOM_CACHE_DIR",
)
#: A user without an entry in /etc/passwd.
STRANGER = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@dataclass
class Stage:
    """A folder that every user can enter, with a home, a TMPDIR, and a portamoe that prints its arguments."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    def run(self, *arguments: str, user: int | None = None, script: Path = SCRIPT, **environment: str | None):
        """Run the entrypoint with a small environment; None removes a variable."""
        env = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.home), "TMPDIR": str(self.tmp)}
        env = {name: value for name, value in {**env, **environment}.items() if value is not None}
        command = ["/bin/bash", str(script), *arguments]
        return subprocess.run(command, env=env, user=user, cwd="/", capture_output=True, text=True, check=False)

    def environment(self, **options) -> dict[str, str]:
        """Return what a program sees that the entrypoint started."""
        done = self.run("env", **options)
        assert done.returncode == 0, done.stderr
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for part in ("home", "tmp", "bin"):
            (folder / part).mkdir()
        (folder / "tmp").chmod(0o1777)
        fake = folder / "bin/portamoe"
        fake.write_text('#!/bin/sh\nprintf "portamoe"\nfor word; do printf " [%s]" "$word"; done\nexit 7\n')
        fake.chmod(0o755)
        copy = folder / "entrypoint.sh"
        shutil.copy(SCRIPT, copy)
        copy.chmod(0o755)
        yield Stage(folder)


def test_script_parses_and_is_executable() -> None:
    assert subprocess.run(["/bin/bash", "-n", SCRIPT], check=False).returncode == 0
    assert SCRIPT.stat().st_mode & stat.S_IXUSR


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((), "portamoe [probe] [capabilities]"),
        (("probe", "capabilities", "--json"), "portamoe [probe] [capabilities] [--json]"),
        (("run", "--checkpoint", "/a b"), "portamoe [run] [--checkpoint] [/a b]"),
        (("--help",), "portamoe [--help]"),
        (("echo", "probe", "a  b"), "probe a  b\n"),
    ],
    ids=["none", "probe", "run", "option", "program"],
)
def test_first_word_decides_what_runs(stage: Stage, arguments: tuple[str, ...], shown: str) -> None:
    done = stage.run(*arguments)
    assert done.stdout == shown
    assert done.stderr == ""
    assert done.returncode == (7 if shown.startswith("portamoe") else 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_portamoe_is_known(stage: Stage, command: str) -> None:
    assert stage.run(command).stdout == f"portamoe [{command}]"


def test_unknown_word_is_named(stage: Stage) -> None:
    done = stage.run("prbe")
    assert done.returncode == 127
    assert "prbe is neither a portamoe command nor a program" in done.stderr


def test_caches_are_private_and_outside_home(stage: Stage) -> None:
    seen = stage.environment()
    scratch = stage.tmp / f"portamoe-{os.geteuid()}"
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    for name in CACHES:
        assert Path(seen[name]).is_dir()
        assert scratch in Path(seen[name]).parents
    assert seen["HOME"] == str(stage.home)
    assert list(stage.home.iterdir()) == []


def test_second_start_uses_the_same_folders(stage: Stage) -> None:
    assert stage.environment() == stage.environment()


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("value", ["/scratch/mine", ""])
def test_what_the_user_set_stays(stage: Stage, name: str, value: str) -> None:
    seen = stage.environment(**{name: value})
    assert seen[name] == value
    assert not Path("/scratch/mine").exists()
    assert all(Path(seen[other]).is_dir() for other in CACHES if other != name)


@pytest.mark.parametrize("home", [None, "", "/", "/absent/home"])
def test_home_gets_a_fallback(stage: Stage, home: str | None) -> None:
    seen = stage.environment(HOME=home)
    assert seen["HOME"] == str(stage.tmp / f"portamoe-{os.geteuid()}/home")
    assert Path(seen["HOME"]).is_dir()


@needs_root
def test_unknown_user_gets_a_home_and_a_name(stage: Stage) -> None:
    seen = stage.environment(user=STRANGER, script=stage.folder / "entrypoint.sh")
    assert seen["HOME"] == str(stage.tmp / f"portamoe-{STRANGER}/home")  # the other's home is not writable
    assert seen["USER"] == seen["LOGNAME"] == f"uid{STRANGER}"
    assert (stage.tmp / f"portamoe-{STRANGER}").stat().st_uid == STRANGER


@needs_root
def test_folder_that_another_user_planted_is_not_used(stage: Stage) -> None:
    planted = stage.tmp / f"portamoe-{STRANGER}"
    planted.mkdir()
    planted.chmod(0o777)
    seen = stage.environment(user=STRANGER, script=stage.folder / "entrypoint.sh")
    assert planted not in Path(seen["TRITON_CACHE_DIR"]).parents
    assert Path(seen["TRITON_CACHE_DIR"]).parent.stat().st_uid == STRANGER


def test_planted_link_is_not_followed(stage: Stage) -> None:
    target = stage.folder / "elsewhere"
    target.mkdir()
    (stage.tmp / f"portamoe-{os.geteuid()}").symlink_to(target)
    stage.environment()
    assert list(target.iterdir()) == []


def variant(stage: Stage, old: str, new: str) -> Path:
    """Return the script with one path replaced by a stand-in."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert old in text
    path = stage.folder / "variant.sh"
    path.write_text(text.replace(old, new), encoding="utf-8")
    path.chmod(0o755)
    return path


def test_no_writable_folder_is_said_and_nothing_is_set(stage: Stage) -> None:
    script = variant(stage, '"${TMPDIR:-}" /tmp /dev/shm', "/absent/one /absent/two")
    done = stage.run("env", script=script)
    assert done.returncode == 0
    assert "no writable folder" in done.stderr
    assert not any(name in done.stdout for name in CACHES)


@needs_root
def test_kfd_that_cannot_be_opened_is_explained_on_stderr(stage: Stage) -> None:
    device = stage.folder / "kfd"
    device.write_text("unchanged")
    device.chmod(0o600)
    script = variant(stage, "/dev/kfd", str(device))
    done = stage.run(user=STRANGER, script=script)
    assert done.stdout == "portamoe [probe] [capabilities]"
    assert f"UID {STRANGER} cannot open it" in done.stderr
    assert "belongs to group 0 (root)" in done.stderr
    assert "--group-add 0" in done.stderr
    # Who can open it hears nothing, and opening it changes nothing.
    assert stage.run(script=script).stderr == ""
    assert device.read_text() == "unchanged"


def test_absent_kfd_is_no_subject(stage: Stage) -> None:
    done = stage.run(script=variant(stage, "/dev/kfd", "/absent/kfd"))
    assert done.stderr == ""
