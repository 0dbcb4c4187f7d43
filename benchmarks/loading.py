"""Load one rank's part of a Kimi-K3 sized checkpoint: GB/s against plain safetensors, memory, time of the index.

    python benchmarks/loading.py [--folder TMP] [--repeats 3] [--json FILE]

Writes a checkpoint of the real shape into a temporary folder and removes it: 92 MoE layers of 896 experts, one shard a
layer, 1.5 TB of which only layer 1's experts 0:112 hold data (1.97 GB, random); the rest are holes of sparse files.
Each figure is the median of child processes in turn. "cold" drops the file's pages from the page cache before.

ours          every expert of the rank into one set of stacked tensors, through `Checkpoint`
safetensors   `safe_open(...).get_tensor(name)` of the same tensors, copied into the same stacked tensors
read          the same bytes with `readinto` of 16 MB pieces, without looking at them: what the file system gives
Memory is the peak of anonymous and of file-backed pages of the process above what it had with the destination.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LAYERS, EXPERTS, LOCAL, LATENT, INTER = range(1, 93), 896, 112, 3584, 3072
PREFIX = "language_model.model.layers.{}.block_sparse_moe.experts.{}."
SHAPES = {"w1": (INTER, LATENT), "w3": (INTER, LATENT), "w2": (LATENT, INTER)}
EXPERT_BYTES = sum(rows * (columns // 2 + columns // 32) for rows, columns in SHAPES.values())
#: moonshotai/Kimi-K3's config.json, as far as the experts need it.
CONFIG: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_experts": EXPERTS,
        "num_experts_per_token": 16,
        "moe_intermediate_size": INTER,
        "routed_expert_hidden_size": LATENT,
        "first_k_dense_replace": 1,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "weights": {"num_bits": 4, "type": "float", "group_size": 32},
                }
            },
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*"],
        },
    },
}


def tensors(layer: int) -> dict[str, tuple[int, int]]:
    """Names and shapes of a layer's expert tensors in the order of the file, all U8."""
    out = {}
    for expert in range(EXPERTS):
        for projection, (rows, columns) in SHAPES.items():
            base = PREFIX.format(layer, expert) + projection
            out[f"{base}.weight_packed"] = (rows, columns // 2)
            out[f"{base}.weight_scale"] = (rows, columns // 32)
    return out


def shard(layer: int) -> str:
    return f"model-{layer:05}-of-{len(LAYERS):06}.safetensors"


def write_checkpoint(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for layer in LAYERS:
        header, end = {}, 0
        for name, (rows, columns) in tensors(layer).items():
            header[name] = {"dtype": "U8", "shape": [rows, columns], "data_offsets": [end, end + rows * columns]}
            end += rows * columns
            weight_map[name] = shard(layer)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / shard(layer)).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            if layer == 1:
                for _ in range(LOCAL):
                    file.write(os.urandom(EXPERT_BYTES))
            file.flush()
            os.fsync(file.fileno())
            os.truncate(file.fileno(), 8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def drop_cache(folder: Path) -> None:
    descriptor = os.open(folder / shard(1), os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class Memory:
    """The most anonymous and file-backed memory of this process while it is watched, bytes above the start."""

    def __init__(self) -> None:
        self._stop, self.start = threading.Event(), self.now()
        self.peak = dict(self.start)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> dict[str, int]:
        text = Path("/proc/self/status").read_text()
        found = re.findall(r"Rss(Anon|File):\s+(\d+) kB", text)
        return {name.lower(): int(value) * 1024 for name, value in found}

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            for name, value in self.now().items():
                self.peak[name] = max(self.peak[name], value)

    def above_start(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return {name: self.peak[name] - self.start[name] for name in self.peak}


def read_counters() -> dict[str, int]:
    text = Path("/proc/self/io").read_text()
    return {name: int(value) for name, value in re.findall(r"(rchar|read_bytes): (\d+)", text)}


def child(kind: str, folder: Path, ranks: int) -> dict[str, Any]:
    """Load in this process; the modules are imported and the checkpoint is opened before the clock starts."""
    import torch
    from safetensors import safe_open

    from portamoe.checkpoints import Checkpoint
    from portamoe.weights import ExpertWeights

    torch.set_num_threads(1)
    opened = time.perf_counter()
    checkpoint = Checkpoint(folder)
    index_s = time.perf_counter() - opened
    spec, source = checkpoint.experts(1, range(LOCAL), tensor_parallel=(0, ranks))
    layer_s = time.perf_counter() - opened - index_s
    inter, height, width = spec.intermediate_size, 2 * spec.intermediate_size, spec.hidden_size
    shapes = {"w13": (height, width // 2), "w13_scale": (height, width // 32)}
    shapes |= {"w2": (width, inter // 2), "w2_scale": (width, inter // 32)}
    destination = {name: torch.zeros((LOCAL, *shape), dtype=torch.uint8) for name, shape in shapes.items()}
    for tensor in destination.values():
        tensor.fill_(1)  # its pages exist before the memory is watched
    stack = ExpertWeights(**destination)
    suffixes = {"w13": "weight_packed", "w13_scale": "weight_scale", "w2": "weight_packed", "w2_scale": "weight_scale"}

    def plain() -> None:
        with safe_open(os.fspath(folder / shard(1)), framework="pt", device="cpu") as file:
            for expert in range(LOCAL):
                base = PREFIX.format(1, expert)
                for name, target in destination.items():
                    if name.startswith("w2"):
                        target[expert].copy_(file.get_slice(f"{base}w2.{suffixes[name]}")[:, : target.shape[2]])
                    else:
                        for half, projection in zip(target[expert].chunk(2), ("w1", "w3"), strict=True):
                            half.copy_(file.get_slice(f"{base}{projection}.{suffixes[name]}")[:inter])

    def ours() -> None:
        for index in range(LOCAL):
            source.read_into(index, stack.expert(index))

    def raw() -> None:
        buffer = bytearray(16 << 20)
        left = LOCAL * EXPERT_BYTES
        with (folder / shard(1)).open("rb", buffering=0) as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            while left > 0:
                left -= file.readinto(buffer) or left

    before, memory, start = read_counters(), Memory(), time.perf_counter()
    {"ours": ours, "safetensors": plain, "read": raw}[kind]()
    seconds, after = time.perf_counter() - start, read_counters()
    kept = LOCAL * EXPERT_BYTES if kind == "read" else sum(t.nbytes for t in destination.values())
    return {
        "seconds": seconds,
        "gb_per_s": kept / seconds / 1e9,
        "kept_bytes": kept,
        "asked_bytes": after["rchar"] - before["rchar"],
        "disk_bytes": after["read_bytes"] - before["read_bytes"],
        "memory_above_destination": memory.above_start(),
        "sum": sum(int(t[-1].long().sum()) for t in destination.values()),
        "index_s": index_s,
        "layer_s": layer_s,
    }


def run_child(kind: str, folder: Path, ranks: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", kind, "--folder", str(folder), "--ranks", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def index_times(folder: Path) -> dict[str, float]:
    """Seconds to open the checkpoint, and for a first and a further layer of it; headers are in the page cache."""
    from portamoe.checkpoints import Checkpoint, load_experts

    load_experts(folder, 1, range(LOCAL))
    start = time.perf_counter()
    load_experts(folder, 2, range(LOCAL))
    one_shot = time.perf_counter() - start
    start = time.perf_counter()
    checkpoint = Checkpoint(folder)
    times = [time.perf_counter() - start]
    for layer in (1, 2, 3, 4):
        start = time.perf_counter()
        checkpoint.experts(layer, range(LOCAL))
        times.append(time.perf_counter() - start)
    return {
        "load_experts": one_shot,
        "open": times[0],
        "first_layer": times[1],
        "further_layer": statistics.median(times[2:]),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in ("seconds", "gb_per_s")}
    out |= {key: max(run[key] for run in runs) for key in ("kept_bytes", "asked_bytes", "disk_bytes")}
    for kind in ("anon", "file"):
        out[f"{kind}_memory"] = max(run["memory_above_destination"][kind] for run in runs)
    out["anon_in_experts"] = out["anon_memory"] / EXPERT_BYTES
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("ours", "safetensors", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.folder, args.ranks)))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="portamoe-loading-", dir=args.folder))
    rows = []
    try:
        write_checkpoint(folder)
        index = index_times(folder)
        for ranks in (1, 8):
            for state in ("warm", "cold"):
                kinds = ("ours", "safetensors", "read") if ranks == 1 else ("ours", "safetensors")
                runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
                for _ in range(args.repeats):
                    for kind in kinds:
                        if state == "cold":
                            drop_cache(folder)
                        runs[kind].append(run_child(kind, folder, ranks))
                for kind in kinds:
                    row = {"what": kind, "cache": state, "tensor_parallel": ranks, **summary(runs[kind])}
                    rows.append(row)
                    print(
                        f"{kind:12} {state} TP{ranks}  {row['gb_per_s']:6.2f} GB/s  {row['seconds']:6.2f} s  asked "
                        f"{row['asked_bytes'] / 1e9:5.2f} GB  anonymous {row['anon_in_experts']:5.2f} experts  "
                        f"mapped {row['file_memory'] / 1e6:7.1f} MB"
                    )
                sums = {run["sum"] for kind in ("ours", "safetensors") for run in runs[kind]}
                if len(sums) != 1:
                    raise SystemExit(f"the two loads differ: {sums}")
    finally:
        shutil.rmtree(folder)
    print("index " + ", ".join(f"{name} {value:.2f} s" for name, value in index.items()))
    if args.json:
        report = {
            "kind": "measured",
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/loading.py",
            "host": f"{platform.machine()}, {os.cpu_count()} cores, local disk",
            "python": platform.python_version(),
            "repeats": args.repeats,
            "expert_bytes": EXPERT_BYTES,
            "experts": LOCAL,
            "index_s": index,
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    worst = max(row["anon_in_experts"] for row in rows if row["what"] == "ours")
    return 0 if worst < 3 else 1


if __name__ == "__main__":
    sys.exit(main())
