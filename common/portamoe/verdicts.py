"""Verdicts of the canary: what each is about, and where they are kept between processes.

A verdict belongs to a backend, the versions of all packages it may run on, an arch, and the small spec that the canary
computes, which has the activation with its parameters, the formats and the alignment of the sizes asked for. Reading
one takes a stat and a small file; neither torch nor a vendor package is imported.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.decision import Accepted, Decision, Reason, Rejected
from portamoe.detection.distributions import version

if TYPE_CHECKING:
    from portamoe.backend import Backend
    from portamoe.device import Device, Host
    from portamoe.spec import MoESpec

#: Of the files; grows when the canary asks for more, so that older verdicts are void.
SCHEMA = 1
CACHE_VARIABLE = "PORTAMOE_CACHE_DIR"
DEFAULT_CACHE = "~/.cache/portamoe"
#: "auto" runs the canary where no verdict is known, "force" always, "skip" never (a known failure is not looked at).
MODE_VARIABLE = "PORTAMOE_CANARY"
MODES = ("auto", "force", "skip")
#: What `Reason.what` says of a failed canary.
WHAT = "canary"
#: Distributions that no kernel depends on.
_IRRELEVANT = frozenset({"safetensors", "packaging", "tqdm", "numpy", "nvidia-ml-py", "vllm"})
#: Variables that switch kernels; those whose value is a path only say where something lies.
_SWITCHES = ("AITER_", "FLASHINFER_", "TRITON_INTERPRET")
_TUNED_VARIABLE = "PORTAMOE_TUNED_DIR"
#: Files that decide what a backend computes.
_CODE = (".py", ".json", ".so", ".pyd")
#: Sizes of the small spec: GPUs have tiles of up to 512, and a size keeps its remainder of that.
_GPU_MULTIPLE, _CPU_MULTIPLE = 512, 128
#: Local experts of the small spec, or K where that is more, and experts of other ranks on either side.
_EXPERTS, _REMOTE = 4, 2

_LOG = logging.getLogger("portamoe")

#: A way in which the runtime may serve a call: the name of a tactic (None: the backend's own choice), and tokens T.
Case = tuple[str | None, int]


@dataclass(frozen=True)
class Verdict:
    """What a canary found.

    reason:      why it failed, None if it passed
    cases:       (tactic, tokens) that were run
    indistinct:  alternatives that no result within the tolerance can be told from
    seconds:     that it took, compiling included
    date:        UTC, ISO 8601
    """

    passed: bool
    reason: Reason | None
    cases: tuple[Case, ...]
    indistinct: tuple[str, ...] = ()
    seconds: float = 0.0
    date: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Read the JSON form; raises KeyError, TypeError or ValueError for anything else."""
        values = dict(data)
        values["reason"] = None if values["reason"] is None else Reason(**values["reason"])
        values["cases"] = tuple((tactic, int(tokens)) for tactic, tokens in values["cases"])
        values["indistinct"] = tuple(values["indistinct"])
        verdict = cls(**values)
        if verdict.passed is not (verdict.reason is None):
            raise ValueError("a verdict has a reason if it failed, and only then")
        return verdict


@dataclass(frozen=True)
class Key:
    """What a verdict is about, as canonical JSON in `text`, and a file name that follows from it."""

    text: str
    file: str


def key_of(backend: Backend, small: MoESpec, device: Device) -> Key:
    """Return the key of `backend`'s verdict on the small spec `small` on devices like `device`."""
    host = device.host
    versions = {name: found for name, found in host.distributions.items() if name not in _IRRELEVANT}
    facts = {
        "schema": SCHEMA,
        "backend": backend.name,
        "package": backend.package,
        "versions": dict(sorted(versions.items())) | {"backend": version(backend.package)},
        "source": _fingerprint(backend),
        "python": host.python,
        "torch": _plain(host.torch),
        "vendor": _plain(host.vendor),
        "driver": [(host.nvml or {}).get("driver"), (host.rocm or {}).get("driver"), (host.rocm or {}).get("version")],
        "switches": {name: value for name, value in sorted(host.env.items()) if _switches(name, value)},
        "arch": device.arch,
        "spec": small.to_dict(),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    digest = _sha256(text)[:20]
    return Key(text, f"{backend.name}-{device.arch}-{digest}.json".replace(os.sep, "_"))


def _switches(name: str, value: str) -> bool:
    return name == _TUNED_VARIABLE or (name.startswith(_SWITCHES) and not value.startswith(("/", "~", ".")))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _fingerprint(backend: Backend) -> str | None:
    """Return a digest of the files of the top-level package that the backend's class is from."""
    module = sys.modules.get(type(backend).__module__.partition(".")[0])
    file = getattr(module, "__file__", None)
    return _files_fingerprint(str(Path(file).parent), Path(file).name) if file else None


@functools.cache
def _files_fingerprint(folder: str, name: str) -> str:
    """Return a digest of names, sizes and times of code and tables: an edited kernel has to be checked again.

    A single module is its own file `name` in `folder`; a package is all that lies below.
    """
    files = _code_below(folder) if name == "__init__.py" else [Path(folder, name)]
    found = []
    for file in files:
        with suppress(OSError):
            facts = file.stat()
            found.append((str(file.relative_to(folder)), facts.st_size, facts.st_mtime_ns))
    return _sha256(repr(sorted(found)))[:16]


def _code_below(folder: str) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(place, name) for name in names if name.endswith(_CODE))


def _sha256(text: str) -> str:
    import hashlib  # it loads OpenSSL, and `import portamoe` comes here only where a verdict is kept

    return hashlib.sha256(text.encode()).hexdigest()


def canary_spec(backend: Backend, spec: MoESpec, device: Device) -> MoESpec | None:
    """Return the small spec on which the canary of `spec` runs, None if `backend` accepts none.

    It has the activation, formats, biases and K of `spec`, few experts, and sizes with the same remainders, so that
    the same kernels and the same padding are at work. A backend may have its own: `canary_spec(spec)`.
    """
    own = getattr(backend, "canary_spec", None)
    candidates = iter([own(spec)]) if own is not None else _small_specs(spec, device)
    return next((small for small in candidates if not backend.check(small, device)), None)


def _small_specs(spec: MoESpec, device: Device) -> Iterator[MoESpec]:
    local = spec.local_experts
    count = min(len(local), max(spec.top_k, _EXPERTS))
    before, after = min(local.start, _REMOTE), min(spec.num_experts - local.stop, _REMOTE)
    experts = before + count + after
    few = replace(
        spec,
        num_experts=experts,
        top_k=min(spec.top_k, experts),
        local_experts=range(before, before + count),
    )
    multiple = _CPU_MULTIPLE if device.vendor == "cpu" else _GPU_MULTIPLE
    sizes = (spec.hidden_size, spec.intermediate_size)
    hidden, inter = (size if size < 2 * multiple else multiple + size % multiple for size in sizes)
    yield replace(few, hidden_size=hidden, intermediate_size=inter)
    yield few


class VerdictStore:
    """Verdicts of this process and, where the folder can be used, on disk: one file a key, replaced as a whole.

    folder:  where the files lie; it is made when the first is written. None: verdicts stay in this process

    A file that cannot be read, or is not about the key, is as good as none and is overwritten.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._known: dict[str, Verdict] = {}
        self._said: set[str] = set()
        self._forced: set[str] = set()

    def is_empty(self) -> bool:
        """Return whether no verdict can be known, without the cost of a key."""
        return not self._known and (self.folder is None or not self.folder.is_dir())

    def read(self, key: Key) -> Verdict | None:
        """Return what is known, from this process or from the file."""
        if known := self._known.get(key.text):
            return known
        if self.folder is None:
            return None
        path = self.folder / key.file
        try:
            verdict = _about(key, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.debug("ignoring the verdict in %s: %s: %s", path, type(error).__name__, error)
            return None
        self._known[key.text] = verdict
        return verdict

    def write(self, key: Key, verdict: Verdict, *, durable: bool = True) -> None:
        """Keep a verdict; `durable`: beyond this process, if the folder can be written."""
        self._known[key.text] = verdict
        if not durable or self.folder is None:
            return
        text = json.dumps({"key": json.loads(key.text), "verdict": verdict.to_dict()}, indent=1)
        # A name of its own for every writer: on a shared file system two ranks may have one process id.
        beside = self.folder / f".{key.file}.{os.getpid()}.{os.urandom(6).hex()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.folder / key.file)  # ranks that write at once leave one whole file
        except OSError as error:
            _LOG.debug("verdicts stay in this process: %s cannot be written: %s", self.folder, error)
            with suppress(OSError):
                beside.unlink()

    def first_time(self, key: Key) -> bool:
        """Return True once a process and key: what is forced is run once, not for each of a model's layers."""
        first = key.text not in self._forced
        self._forced.add(key.text)
        return first

    def say_once(self, key: str, message: str) -> None:
        """Log a warning, but the same one only once a process."""
        if key not in self._said:
            self._said.add(key)
            _LOG.warning(message)


def _about(key: Key, data: Any) -> Verdict:
    if data["key"] != json.loads(key.text):
        raise ValueError("it is about another key")
    return Verdict.from_dict(data["verdict"])


def store(host: Host) -> VerdictStore:
    """Return the store of the folder that $PORTAMOE_CACHE_DIR or its default names."""
    folder = environment(host).get(CACHE_VARIABLE) or DEFAULT_CACHE
    return _store(os.path.expanduser(folder))  # noqa: PTH111 - Path.expanduser raises without a home


@functools.cache
def _store(folder: str) -> VerdictStore:
    if folder.startswith("~"):
        _LOG.debug("verdicts stay in this process: there is no home for %s; set %s", folder, CACHE_VARIABLE)
        return VerdictStore(None)
    return VerdictStore(Path(folder) / "verdicts")


def environment(host: Host) -> Mapping[str, str]:
    """Return the variables that count: the recording's on a replayed host, else those of now."""
    return host.env if host.recorded else os.environ


def cached(backend: Backend, spec: MoESpec, device: Device) -> Verdict | None:
    """Return the known verdict on `backend` for `spec`; None on a replayed host, whose caches are elsewhere."""
    if device.host.recorded or store(device.host).is_empty():
        return None
    small = canary_spec(backend, spec, device)
    return None if small is None else store(device.host).read(key_of(backend, small, device))


def applied(decision: Accepted, verdict: Verdict | None, mode: str | None = None) -> Decision:
    """Return the decision that an acceptance becomes by a verdict; mode "skip" looks at no failure."""
    if verdict is None:
        return decision
    if verdict.reason is None:
        return replace(decision, verification="verified")
    return decision if mode == "skip" else Rejected(decision.backend, decision.package, (verdict.reason,))
