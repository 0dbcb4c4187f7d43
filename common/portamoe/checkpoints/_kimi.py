"""What all releases of Kimi-K3 share: config keys, names, and experts stored as w1, w2 and w3 each on its own.

w1 is the gate, w3 is up, w2 is down. The releases differ in which tensors stand for one projection; `Storage` says so.
Source of the config keys: moonshotai/Kimi-K3, config.json, text_config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portamoe.activations import SiTU
from portamoe.checkpoints._config import Config
from portamoe.checkpoints._experts import Expected, ReadExpert, Share, check_tensors
from portamoe.checkpoints._safetensors import TensorFolder
from portamoe.checkpoints.errors import CheckpointError
from portamoe.spec import BLOCK_SIZE, MoESpec, WeightFormat
from portamoe.weights import Expert

if TYPE_CHECKING:
    import torch

#: Where the tensors of layer i's MoE block stand: in the multimodal model, and in its text part alone.
PREFIXES = ("language_model.model.layers.{}.block_sparse_moe.", "model.layers.{}.block_sparse_moe.")
PROJECTIONS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class Storage:
    """The tensors that stand for one projection of N rows and K columns, by the suffix of their names.

    weight:            U8 (N, K/2), low nibble = even K
    scale:             (N, K/block) of one of `scale_dtypes`
    global_scale:      F32 scalar, or None; stored as its reciprocal where `reciprocal` is set
    input_scale:       F32 scalar, or None; likewise
    """

    weight_format: WeightFormat
    scale_dtypes: tuple[str, ...]
    weight: str
    scale: str = ".weight_scale"
    global_scale: str | None = None
    input_scale: str | None = None
    reciprocal: bool = False

    @property
    def block(self) -> int:
        """Values of K that share one scale."""
        return BLOCK_SIZE[self.weight_format]

    def expected(self, module: str, rows: int, columns: int) -> dict[str, Expected]:
        """Return the tensors of the projection `module` with (rows, columns) values."""
        out = {
            module + self.weight: Expected(("U8",), (rows, columns // 2)),
            module + self.scale: Expected(self.scale_dtypes, (rows, columns // self.block)),
        }
        for suffix in (self.global_scale, self.input_scale):
            if suffix is not None:
                out[module + suffix] = Expected(("F32",), (), other_shapes=((1,),))
        return out


@dataclass(frozen=True)
class KimiReader:
    """Reads one kind of Kimi-K3 checkpoint.

    weight_format:  that of the experts
    storage:        checks the config's quantisation section for the given modules ("….experts.3.w1") and returns how
                    they are stored
    """

    description: str
    weight_format: WeightFormat
    storage: Callable[[Config, Sequence[str]], Storage]

    def spec(self, config: Config, layer: int) -> MoESpec:
        """Return the whole layer's spec; raises CheckpointError when the config lacks it or the layer is dense."""
        check_layer(config, layer)
        return MoESpec(
            hidden_size=config.integer("routed_expert_hidden_size", config.integer("hidden_size")),
            intermediate_size=config.integer("moe_intermediate_size"),
            num_experts=config.integer("num_experts"),
            top_k=config.integer("num_experts_per_token"),
            activation=activation_of(config),
            weight_format=self.weight_format,
        )

    def open(self, config: Config, folder: TensorFolder, layer: int, spec: MoESpec, share: Share) -> ReadExpert:
        """Check the tensors of the layer's local experts and return how to read one by its id in the layer."""
        prefix = prefix_of(folder, layer) + "experts."
        modules = [f"{prefix}{e}.{p}" for e in spec.local_experts for p in PROJECTIONS]
        storage = self.storage(config, modules)
        hidden, inter = spec.hidden_size, spec.intermediate_size
        expected: dict[str, Expected] = {}
        for module in modules:
            rows, columns = (hidden, inter) if module.endswith("w2") else (inter, hidden)
            expected |= storage.expected(module, rows, columns)

        def relevant(name: str) -> bool:
            number = name.removeprefix(prefix).partition(".")[0]
            return not number.isdecimal() or int(number) in spec.local_experts or int(number) >= spec.num_experts

        sizes = f"H={hidden}, I={inter}, E={spec.num_experts} in {config.path}"
        check_tensors(folder, prefix, expected, relevant, sizes)
        return lambda expert, out: _read(folder, storage, f"{prefix}{expert}.", share, out)


def _read(folder: TensorFolder, storage: Storage, base: str, share: Share, out: Expert | None) -> Expert:
    import torch

    def scalar(projection: str, suffix: str) -> torch.Tensor:
        name = base + projection + suffix
        value = folder.read(name).reshape(())
        if not math.isfinite(value) or value < 0 or (storage.reciprocal and value == 0):
            raise CheckpointError(f"{folder.directory}: {name} is {float(value)}, expected a finite positive scale")
        if not math.isfinite(scale := value.reciprocal() if storage.reciprocal else value):
            raise CheckpointError(f"{folder.directory}: {name} is {float(value)}, its reciprocal is no finite float32")
        return scale

    def matrix(field: str, projections: tuple[str, ...], suffix: str, *index: slice) -> torch.Tensor:
        target = None if out is None else getattr(out, field)
        return folder.read([base + projection + suffix for projection in projections], index, target)

    tensors = {
        "w13": matrix("w13", ("w1", "w3"), storage.weight, *share.rows()),
        "w13_scale": matrix("w13_scale", ("w1", "w3"), storage.scale, *share.rows()),
        "w2": matrix("w2", ("w2",), storage.weight, slice(None), share.columns(2)),
        "w2_scale": matrix("w2_scale", ("w2",), storage.scale, slice(None), share.columns(storage.block)),
    }
    for field, suffix in (("global_scale", storage.global_scale), ("input_scale", storage.input_scale)):
        if suffix is not None:
            # w1 and w3 have one each: using the gate's for both is wrong where they differ.
            tensors[f"w13_{field}"] = torch.stack([scalar("w1", suffix), scalar("w3", suffix)])
            tensors[f"w2_{field}"] = scalar("w2", suffix)
    return Expert(**tensors)


def prefix_of(folder: TensorFolder, layer: int) -> str:
    """Return the start of the names of layer `layer`'s block; raises CheckpointError where two are in use."""
    candidates = tuple(pattern.format(layer) for pattern in PREFIXES)
    present = [prefix for prefix in candidates if folder.below(f"{prefix}experts.")]
    if len(present) > 1:
        raise CheckpointError(f"{folder.directory}: layer {layer} has experts under two names, {' and '.join(present)}")
    return present[0] if present else candidates[0]


def check_layer(config: Config, layer: int) -> None:
    """Raise CheckpointError unless the layer is there and has routed experts."""
    layers = config.integer("num_hidden_layers")
    if not 0 <= layer < layers:
        raise CheckpointError(f"{config.path}: layer {layer} is outside 0:{layers} (num_hidden_layers)")
    first, every = _first_moe_layer(config), config.integer("moe_layer_freq", 1)
    if layer < first or layer % every:
        raise CheckpointError(
            f"{config.path}: layer {layer} is dense and has no routed experts "
            f"(first_k_dense_replace {first}, moe_layer_freq {every})"
        )


def _first_moe_layer(config: Config) -> int:
    value = config.text.get("first_k_dense_replace", 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{config.path}: first_k_dense_replace must be an integer from 0 on, got {value!r}")
    return value


def activation_of(config: Config) -> SiTU:
    """Return SiTU with the config's parameters; raises CheckpointError for another activation or without them."""
    config.expect("hidden_act", "situ")
    for key in ("activation_situ_beta", "activation_situ_linear_beta"):
        if key not in config.text:
            null = " (null if up is not bounded)" if "linear" in key else ""
            raise CheckpointError(f"{config.path}: hidden_act 'situ' needs {key}{null}, which is missing")
    try:
        return SiTU(config.text["activation_situ_beta"], config.text["activation_situ_linear_beta"])
    except (TypeError, ValueError) as error:  # the numbers are the config's
        raise CheckpointError(f"{config.path}: {error}") from error
