"""Small checkpoints of every format that is read, written into a folder; tests change one thing before writing."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from portamoe.weights import Expert

DATA = Path(__file__).parent / "data"
E, H, I, K = 4, 64, 96, 2  # noqa: E741
KIMI_PREFIX = "language_model.model.layers.1.block_sparse_moe.experts."
GPT_OSS_PREFIX = "model.layers.0.mlp.experts."
SHARD = "model-0000{}-of-00002.safetensors"


@dataclass
class Checkpoint:
    """Config and tensors of a checkpoint; `places` overrides the shard of a tensor, `index` what the index says."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    layer: int
    places: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config.get("quantization_config") or self.text["quantization_config"]

    def rename(self, old: str, new: str) -> None:
        self.tensors = {name.replace(old, new): value for name, value in self.tensors.items()}

    def write(self, directory: Path, *, sharded: bool = True) -> Path:
        """Write two shards (even experts or tensors, odd ones) and an index, or one file without an index."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        if not sharded:
            save_file(self.tensors, directory / "model.safetensors")
            return directory
        shards: dict[str, dict[str, torch.Tensor]] = {SHARD.format(1): {}, SHARD.format(2): {}}
        weight_map = {}
        for position, (name, value) in enumerate(self.tensors.items()):
            expert = name.partition("experts.")[2].partition(".")[0]
            odd = (int(expert) if expert.isdecimal() else position) % 2
            file = self.places.get(name, SHARD.format(1 + odd))
            shards.setdefault(file, {})[name] = value
            weight_map[name] = file
        for file, tensors in shards.items():
            save_file(tensors, directory / file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return directory


def edit_index(directory: Path, changes: dict[str, str | None]) -> None:
    """Let the index of a written checkpoint name other files for tensors, or drop them (None)."""
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in changes.items():
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    path.write_text(json.dumps(index))


def _config(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DATA / folder / "config.json").read_text())
    return config


def _kimi_config(quantization: dict[str, Any]) -> dict[str, Any]:
    config = _config("kimi-k3-tiny")
    config["text_config"] |= {
        "num_experts": E,
        "num_experts_per_token": K,
        "routed_expert_hidden_size": H,
        "moe_intermediate_size": I,
        "quantization_config": quantization,
    }
    return config


def _bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).integers(low, high, shape, dtype=np.uint8))


def _projections() -> list[tuple[str, int, int, int]]:
    """Name, rows, columns and number of each expert's projections."""
    shapes = {"w1": (I, H), "w2": (H, I), "w3": (I, H)}
    return [
        (f"{KIMI_PREFIX}{e}.{p}", *shape, 3 * e + i) for e in range(E) for i, (p, shape) in enumerate(shapes.items())
    ]


def kimi_k3() -> Checkpoint:
    """compressed-tensors mxfp4-pack-quantized."""
    config = _kimi_config(_config("kimi-k3-tiny")["text_config"]["quantization_config"])
    tensors = {}
    for base, rows, columns, number in _projections():
        tensors[f"{base}.weight_packed"] = _bytes(rows, columns // 2) ^ number
        tensors[f"{base}.weight_scale"] = _bytes(rows, columns // 32, low=110, high=130) + number
    tensors["language_model.model.layers.0.mlp.down_proj.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)
    return Checkpoint(config, tensors, layer=1)


def kimi_k3_quark() -> Checkpoint:
    """Quark MXFP4: the same bytes under other names."""
    out = kimi_k3()
    out.rename(".weight_packed", ".weight")
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
    out.text["quantization_config"] = {
        "quant_method": "quark",
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "layer_quant_config": {"*self_attn*": {"weight": {"dtype": "fp8_e4m3"}}},
        "exclude": ["lm_head", "re:vision_tower.*"],
    }
    return out


def kimi_k3_nvfp4() -> Checkpoint:
    """Model Optimizer NVFP4; w1 and w3 have different global scales."""
    config = _config("kimi-k3-nvfp4-tiny")
    section = config["quantization_config"]
    section["quantized_layers"] = {base: {"quant_algo": "NVFP4", "group_size": 16} for base, *_ in _projections()}
    config["text_config"] |= _kimi_config({})["text_config"]
    del config["text_config"]["quantization_config"]
    tensors: dict[str, torch.Tensor] = {}
    for base, rows, columns, number in _projections():
        tensors[f"{base}.weight"] = _bytes(rows, columns // 2) ^ number
        tensors[f"{base}.weight_scale"] = _bytes(rows, columns // 16, low=48, high=80).view(torch.float8_e4m3fn)
        tensors[f"{base}.weight_scale_2"] = torch.tensor(0.5 + number)
        tensors[f"{base}.input_scale"] = torch.tensor(1.0 + number)
    return Checkpoint(config, tensors, layer=1)


def kimi_k3_nvfp4_packed() -> Checkpoint:
    """compressed-tensors nvfp4-pack-quantized: reciprocal global scales of shape (1,)."""
    out = kimi_k3_nvfp4()
    del out.config["quantization_config"]
    group = copy.deepcopy(_config("kimi-k3-tiny")["text_config"]["quantization_config"]["config_groups"]["group_0"])
    group["format"] = "nvfp4-pack-quantized"
    group["weights"] |= {"group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    group["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local", "group_size": 16}
    out.text["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    tensors = {}
    for name, value in out.tensors.items():
        base, _, kind = name.rpartition(".")
        names = {
            "weight": "weight_packed",
            "weight_scale_2": "weight_global_scale",
            "input_scale": "input_global_scale",
        }
        stored = value.reciprocal().reshape(1) if kind in ("weight_scale_2", "input_scale") else value
        tensors[f"{base}.{names.get(kind, kind)}"] = stored
    out.tensors = tensors
    return out


def gpt_oss(hidden: int = H, inter: int = I) -> Checkpoint:
    """gpt-oss mxfp4: stacked, gate and up rows interleaved."""
    config = _config("gpt-oss-tiny") | {
        "num_local_experts": E,
        "hidden_size": hidden,
        "intermediate_size": inter,
    }
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        tensors[f"{GPT_OSS_PREFIX}{name}_blocks"] = _bytes(E, rows, columns // 32, 16)
        tensors[f"{GPT_OSS_PREFIX}{name}_scales"] = _bytes(E, rows, columns // 32, low=110, high=130)
        tensors[f"{GPT_OSS_PREFIX}{name}_bias"] = torch.arange(E * rows).reshape(E, rows).to(torch.bfloat16)
    return Checkpoint(config, tensors, layer=0)


#: One for every format that is read.
BUILDERS = [kimi_k3, kimi_k3_quark, kimi_k3_nvfp4, kimi_k3_nvfp4_packed, gpt_oss]


def read_raw(path: Path) -> dict[str, np.ndarray]:
    """Parse a safetensors file without safetensors: arrays by name, 8-bit floats and bf16 as their bits."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    kinds = {"U8": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I32": "<i4"}
    out = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        out[name] = np.frombuffer(raw[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return out


def read_raw_folder(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of all files in `directory`."""
    out: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        out |= read_raw(path)
    return out


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_nibbles(packed: np.ndarray) -> np.ndarray:
    """(…, K/2) bytes to (…, K) float64, low nibble first."""
    return np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], axis=-1).reshape(*packed.shape[:-1], -1)


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 values of MXFP4 bytes (N, K/2) and E8M0 bytes (N, K/32)."""
    return decode_nibbles(packed) * np.repeat(np.exp2(scale.astype(np.float64) - 127), 32, axis=-1)


def decode_e4m3(code: np.ndarray) -> np.ndarray:
    """float64 values of E4M3 bytes (no NaN)."""
    exponent, mantissa = (code >> 3 & 15).astype(int), (code & 7).astype(float)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    return np.where(code >> 7 == 1, -size, size)


def decode_nvfp4(packed: np.ndarray, scale: np.ndarray, global_scale: float) -> np.ndarray:
    """float64 values of NVFP4 bytes (N, K/2), E4M3 bytes (N, K/16) and a scalar."""
    return decode_nibbles(packed) * np.repeat(decode_e4m3(scale), 16, axis=-1) * float(global_scale)


def decode_bf16(bits: np.ndarray) -> np.ndarray:
    """float64 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def assert_same(a: Expert, b: Expert) -> None:
    """Same tensors, dtypes and bytes."""
    for f in fields(Expert):
        left, right = getattr(a, f.name), getattr(b, f.name)
        assert (left is None) == (right is None), f.name
        if left is not None:
            assert left.dtype == right.dtype, f.name
            assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), f.name
