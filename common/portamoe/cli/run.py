"""`portamoe run`: one layer's routed experts, from a checkpoint to checked outputs."""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portamoe.cli import CliError
from portamoe.whole_files import written_beside

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from portamoe.layer import RoutedExperts
    from portamoe.spec import MoESpec
    from portamoe.weights import Expert, ExpertSource

EXIT_CODES = (
    "exit codes: 0; 1 error above tolerance, or backend rejected, or output not writable; 2 wrong usage or input"
)
#: Calls are repeated until this many seconds or calls have passed, and the median is reported.
_TIMING_SECONDS, _TIMING_CALLS = 1.0, 20
#: A bar appears only for what takes longer than this.
_BAR_DELAY = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run`."""
    parser = subparsers.add_parser(
        "run",
        help="run one layer's routed experts from a checkpoint and check the result",
        description="Load one layer's routed experts, prepare them, run them and report time, bytes, memory and error.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="folder with config.json and safetensors")
    parser.add_argument("--layer", required=True, type=int, metavar="N", help="the layer's number in the model")
    parser.add_argument(
        "--input",
        metavar="F",
        help="safetensors with x (T, H) bf16, topk_ids (T, K) int32 where -1 is not on this rank, "
        "topk_weights (T, K) float32",
    )
    parser.add_argument("--tokens", type=int, metavar="T", help="without --input: draw this many (default: 16)")
    parser.add_argument("--seed", type=int, metavar="S", help="without --input: of the drawn inputs (default: 0)")
    parser.add_argument("--output", metavar="F", help="write y (T, H) bf16 as safetensors; replaced only when complete")
    parser.add_argument("--backend", metavar="NAME", help="use this one or say why not")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda:1, …; default: the first visible one")
    parser.add_argument("--experts", type=_range, metavar="LO:HI", help="one rank's experts; other ids count as -1")
    parser.add_argument("--check", action="store_true", help="compare with the float32 reference")
    parser.add_argument("--expected", metavar="F", help="compare with tensor y_ref of this safetensors file")


def execute(args: argparse.Namespace) -> int:
    """Run the layer; return 0, or 1 when the result is beyond the tolerance."""
    _check_usage(args)
    try:
        return _run(args)
    except RuntimeError as error:
        # torch has a class for a GPU's memory only; on a CPU the allocator's message is all there is.
        if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
            reason = str(error).splitlines()[0]
            raise CliError(f"out of memory: {reason}; take fewer experts (--experts LO:HI) or tokens") from error
        raise


def _run(args: argparse.Namespace) -> int:
    target = _output_path(args.output) if args.output else None
    from portamoe.checkpoints import load_experts

    spec, source = load_experts(args.checkpoint, args.layer, args.experts)
    _check_names(spec, args)
    inputs = _read_inputs(Path(args.input), spec) if args.input else _draw(spec, source, args)
    expected = _read_expected(Path(args.expected), inputs.x) if args.expected else None
    _report("checkpoint", f"{args.checkpoint} layer {args.layer}: {_describe(spec)}")
    layer = _prepare(spec, source, inputs, args)
    y = _call(layer, inputs, source)
    passed = True
    if args.check:
        passed &= _judge("check", y, _reference(spec, source, inputs, layer.device), layer, "the float32 reference")
    if expected is not None:
        passed &= _judge("expected", y, expected, layer, f"y_ref of {args.expected}")
    if target is not None:
        write_safetensors(target, {"y": y.cpu()})
        _report("output", f"{target}: y {tuple(y.shape)} bf16")
    if not passed:
        sys.stderr.write("portamoe: the result is beyond the tolerance\n")
    return 0 if passed else 1


def _check_names(spec: MoESpec, args: argparse.Namespace) -> None:
    """Raise ValueError for a device or backend that there is not, before anything is drawn or printed."""
    from portamoe import registry
    from portamoe.detection import detect

    found = detect()
    device = found.devices[0] if args.device is None else found.device(args.device)
    registry.choose(spec, device, args.backend)


@dataclass(frozen=True)
class Inputs:
    """One call's tensors on the CPU: x (T, H) bf16, topk_ids (T, K) int32, topk_weights (T, K) float32."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the three on `device`."""
        return self.x.to(device), self.topk_ids.to(device), self.topk_weights.to(device)


def _range(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected LO:HI with LO < HI such as 0:112, got {text!r}")
    return range(int(match[1]), int(match[2]))


def _check_usage(args: argparse.Namespace) -> None:
    if args.input and (args.tokens is not None or args.seed is not None):
        raise ValueError("--tokens and --seed draw inputs, --input reads them; give one or the other")
    if args.expected and not args.input:
        raise ValueError("--expected needs the --input that its y_ref belongs to; for drawn inputs use --check")
    if args.tokens is not None and args.tokens < 0:
        raise ValueError(f"--tokens must be at least 0, got {args.tokens}")


def _report(label: str, text: str) -> None:
    sys.stdout.write(f"{label:<10}  {text}\n")
    sys.stdout.flush()


def _describe(spec: MoESpec) -> str:
    local = spec.local_experts
    return (
        f"{spec.weight_format}, H {spec.hidden_size}, I {spec.intermediate_size}, experts {local.start}:{local.stop} "
        f"of {spec.num_experts}, top-{spec.top_k}, {spec.activation}"
    )


# --- inputs ---------------------------------------------------------------------------------------------------------


def _read_tensors(path: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Read the named tensors of a safetensors file; others in it are not looked at."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        with safe_open(str(path), framework="pt") as file:
            there = set(file.keys())
            if missing := [name for name in names if name not in there]:
                raise ValueError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(there)) or 'nothing'}")
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error


def _read_inputs(path: Path, spec: MoESpec) -> Inputs:
    import torch

    tensors = _read_tensors(path, ("x", "topk_ids", "topk_weights"))
    tokens = tensors["x"].shape[0] if tensors["x"].dim() == 2 else "T"
    for name, dtype, shape in (
        ("x", torch.bfloat16, (tokens, spec.hidden_size)),
        ("topk_ids", torch.int32, (tokens, spec.top_k)),
        ("topk_weights", torch.float32, (tokens, spec.top_k)),
    ):
        tensor = tensors[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")
    return Inputs(**tensors)


def _read_expected(path: Path, x: torch.Tensor) -> torch.Tensor:
    tensor = _read_tensors(path, ("y_ref",))["y_ref"]
    if not tensor.dtype.is_floating_point or tensor.shape != x.shape:
        raise ValueError(
            f"{path}: y_ref is {tensor.dtype} {list(tensor.shape)}, expected a float dtype and {list(x.shape)}"
        )
    return tensor


def _draw(spec: MoESpec, source: ExpertSource, args: argparse.Namespace) -> Inputs:
    """Draw inputs on the CPU, so that every device gets the same, large enough to saturate the activation."""
    import torch

    from portamoe.testing import make_routing, make_x

    tokens = 16 if args.tokens is None else args.tokens
    generator = torch.Generator().manual_seed(0 if args.seed is None else args.seed)
    x = make_x(tokens, spec.hidden_size, _x_std(spec, source.expert(0)), generator)
    ids, weights = make_routing(spec, tokens, generator)
    return Inputs(x.bfloat16(), ids, weights)


def _x_std(spec: MoESpec, expert: Expert) -> float:
    """Return the standard deviation of x that drives gates and ups of an expert into saturation, from a few rows."""
    from dataclasses import replace

    import torch

    from portamoe.reference import dequantized
    from portamoe.testing import pre_activation_std

    rows = min(64, spec.intermediate_size)
    picked = torch.cat((torch.arange(rows), spec.intermediate_size + torch.arange(rows)))
    scale = (
        None if expert.w13_scale is None else expert.w13_scale.view(torch.uint8)[picked].view(expert.w13_scale.dtype)
    )
    w13, _ = dequantized(replace(expert, w13=expert.w13[picked], w13_scale=scale))
    norms = (half.square().sum(1).mean().sqrt().item() for half in w13.chunk(2))
    wanted = (std / norm for std, norm in zip(pre_activation_std(spec.activation), norms, strict=True) if norm > 0)
    return max(wanted, default=1.0)


# --- the layer ------------------------------------------------------------------------------------------------------


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr for what takes long; yields a function that sets how much is done."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit="expert", delay=_BAR_DELAY, leave=False, file=sys.stderr) as bar:

        def tick(done: int) -> None:
            bar.update(done - bar.n)

        yield tick


class _Watched:
    """An ExpertSource that counts the experts taken from it."""

    def __init__(self, source: ExpertSource, tick: Callable[[int], None]) -> None:
        self._source, self._tick, self._taken = source, tick, 0

    def __len__(self) -> int:
        return len(self._source)

    def expert(self, index: int) -> Expert:
        self._taken += 1
        self._tick(self._taken)
        return self._source.expert(index)


def _prepare(spec: MoESpec, source: ExpertSource, inputs: Inputs, args: argparse.Namespace) -> RoutedExperts:
    from portamoe.layer import RoutedExperts

    start = time.perf_counter()
    with _bar("prepare", len(source)) as tick:
        layer = RoutedExperts(
            spec,
            source,
            max_tokens=max(1, inputs.x.shape[0]),
            device=args.device,
            backend=args.backend,
            validate=True,
            progress=lambda done, _total: tick(done),
        )
    seconds = time.perf_counter() - start
    device = layer.selection.device
    _report("device", f"{layer.device} ({device.arch}, {device.name})")
    _report("backend", f"{layer.backend.name} ({layer.backend.package}): {layer.selection.why}")
    _report(
        "prepare",
        f"{seconds:.2f} s, weights {_size(layer.prepared_bytes)}, workspace {_size(layer.workspace_bytes)}",
    )
    warm = layer.warm_up()
    _report("warm-up", f"{warm.seconds:.2f} s, {warm.binaries} binaries")
    return layer


def _call(layer: RoutedExperts, inputs: Inputs, source: ExpertSource) -> torch.Tensor:
    """Run the layer until the timing is steady; report and return the result."""
    tensors = inputs.to(layer.device)
    y: torch.Tensor = layer(*tensors)
    times: list[float] = []
    while sum(times) < _TIMING_SECONDS and len(times) < _TIMING_CALLS:
        _wait(layer.device)
        start = time.perf_counter()
        y = layer(*tensors)
        _wait(layer.device)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    hit = _hit(layer.spec, inputs.topk_ids)
    read = hit * layer.prepared_bytes // len(source)
    _report(
        "call",
        f"{y.shape[0]} tokens, {hit} experts hit ({_size(read)}): {seconds * 1e3:.3f} ms, median of {len(times)}, "
        f"{read / seconds / 1e9:.2f} GB/s of weights",
    )
    _report("memory", _memory(layer.device))
    return y


def _hit(spec: MoESpec, topk_ids: torch.Tensor) -> int:
    """Return how many of this rank's experts the ids name."""
    local = spec.local_experts
    return len(set(topk_ids.flatten().tolist()) & set(local))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> str:
    # ru_maxrss is in KiB on Linux.
    text = f"peak resident {_size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}"
    if device.type == "cuda":
        import torch

        text += f", peak on {device} {_size(torch.cuda.max_memory_allocated(device))}"
    return text


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"


# --- the result -----------------------------------------------------------------------------------------------------


def _reference(spec: MoESpec, source: ExpertSource, inputs: Inputs, device: torch.device) -> torch.Tensor:
    from portamoe.reference import moe_reference

    with _bar("reference", _hit(spec, inputs.topk_ids)) as tick:
        return moe_reference(spec, _Watched(source, tick), *inputs.to(device))


def _judge(label: str, y: torch.Tensor, truth: torch.Tensor, layer: RoutedExperts, against: str) -> bool:
    """Report the error against `truth`; return whether it is within the tolerance of backend and format."""
    from portamoe.testing import TOLERANCES, assert_close, error_metrics, tolerance_of

    key = tolerance_of(layer.spec, layer.backend)
    try:
        assert_close(y, truth, roundings=key)
    except AssertionError as error:
        _report(label, f"FAILED against {against}: {error}")
        return False
    bound = TOLERANCES[key]
    _report(label, f"passed against {against}: {error_metrics(y, truth)}; tolerance {key}: RMS {bound.rms:g}")
    return True


def _output_path(name: str) -> Path:
    """Return where to write, after seeing that it can be written: a long run must not end in an error.

    Raises ValueError for something that is no regular file, OSError where the folder cannot be written.
    """
    path = Path(name).resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"--output {name} is no regular file")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"--output {name}: {path.parent} is no folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"--output {name}: {path.parent} cannot be written")
    return path


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """Write the file as a whole: a failure leaves an existing one as it was and nothing else behind."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with written_beside(path) as beside:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(beside))
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
