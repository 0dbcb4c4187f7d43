"""AITER as it is called: imported on first use, its parameters compared, its mode held in the environment meanwhile.

AITER reads AITER_SITUV2_A8W4 and AITER_SITUV2_A4W4 at every call and takes the weights' order from them. `ModeGate`
sets them for the time of a call, lets calls of one mode overlap and keeps other modes out; a value set by the user that
contradicts the mode is refused, never overwritten. A captured graph keeps the kernels that were chosen while it was
captured, so a replay reads no environment and needs no gate.

Sources: ROCm/aiter v0.1.20, aiter/fused_moe.py; csrc/include/aiter_enum.h.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portamoe.decision import Reason
from rocm_moe.aiter.support import Mode, Support, support

if TYPE_CHECKING:
    import torch

    from rocm_moe.aiter.layouts import AiterLayout

#: Every parameter of `fused_moe` that a call names; a version without one of them is refused.
KEYWORDS = (
    "expert_mask",
    "activation",
    "quant_type",
    "doweight_stage1",
    "w1_scale",
    "w2_scale",
    "a1_scale",
    "a2_scale",
    "block_size_M",
    "num_local_tokens",
    "moe_sorting_dispatch_policy",
    "dtype",
    "hidden_pad",
    "intermediate_pad",
    "bias1",
    "bias2",
    "splitk",
    "swiglu_limit",
    "beta",
    "linear_beta",
    "gate_mode",
)
#: The parameters before them, in order.
POSITIONAL = ("hidden_states", "w1", "w2", "topk_weight", "topk_ids")


class AiterUnavailableError(RuntimeError):
    """AITER cannot be used although its files looked right; holds the reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class AiterEnvironmentError(RuntimeError):
    """The environment asks AITER for another mode than the weights were prepared for."""


@dataclass(frozen=True)
class AiterHandle:
    """The imported pieces of AITER that a call needs."""

    fused_moe: Callable[..., torch.Tensor]
    situv2: Any
    per_1x32: Any


def load_aiter() -> AiterHandle:
    """Import AITER and compare what it offers with what the call passes.

    Raises AiterUnavailableError, whatever the import raises: RuntimeError without ROCm, KeyError on an unknown arch,
    OSError for a library that does not load, PermissionError for a read-only folder.
    """
    try:
        module = importlib.import_module("aiter")
        entry = importlib.import_module("aiter.fused_moe")
        handle = AiterHandle(
            fused_moe=entry.fused_moe,
            situv2=module.ActivationType.Situv2,
            per_1x32=module.QuantType.per_1x32,
        )
        parameters = tuple(inspect.signature(handle.fused_moe).parameters)
    except Exception as error:
        raise AiterUnavailableError(import_reason(error)) from error
    if reason := parameter_reason(parameters):
        raise AiterUnavailableError(reason)
    return handle


def import_reason(error: BaseException) -> Reason:
    """Say what an exception at import means and what to do."""
    remedy = "`portamoe probe --deep` imports it in a child process; or use triton_unfused"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == 30):  # EROFS
        remedy = "set AITER_JIT_DIR to a writable folder of this job, or use triton_unfused"
    elif isinstance(error, AttributeError):
        remedy = f"install AMD's AITER >= {support().floor}, or use triton_unfused"
    text = f"{type(error).__name__}: {error}".strip()
    return Reason("aiter import", text[:400], "an import that succeeds", remedy)


def parameter_reason(parameters: tuple[str, ...] | list[str]) -> Reason | None:
    """Return why a `fused_moe` with these parameters cannot be called, or None."""
    if missing := [name for name in (*POSITIONAL, *KEYWORDS) if name not in parameters]:
        return Reason(
            "fused_moe's parameters",
            f"lacks {', '.join(missing)}",
            f"those of AITER >= {support().floor}",
            "install another AITER release, or use triton_unfused",
        )
    return None


def environment_reasons(mode: Mode, env: Mapping[str, str], data: Support | None = None) -> list[Reason]:
    """Return what in `env` would make AITER compute something else than `mode`. Only "1" switches these on."""
    data = support() if data is None else data
    out = []
    for name in data.mode_variables:
        if env.get(name, "0") == "1" and name not in mode.environment:
            out.append(
                Reason(
                    name,
                    "1",
                    f"unset: the spec's {mode.activation_format} activations mean {mode.name}",
                    f"unset it (vLLM sets it: VLLM_ROCM_USE_AITER_MOE_SITUV2={mode.name}), ask for that activation "
                    "format in the spec, or use triton_unfused",
                )
            )
    for name, why in data.refused_variables.items():
        if env.get(name, "0") == "1":
            out.append(Reason(name, "1", f"unset: {why}", "unset it, or use triton_unfused"))
    return out


class ModeGate:
    """Holds AITER's mode in the environment while calls of that mode run; other modes wait.

    environ: the environment that AITER reads
    """

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._condition = threading.Condition()
        self._mode: Mode | None = None
        self._inside = 0
        self._before: dict[str, str | None] = {}

    @contextmanager
    def hold(self, mode: Mode) -> Iterator[None]:
        """Set what `mode` needs for the time of the block and restore it after the last block of that mode.

        Raises AiterEnvironmentError when the environment asks for another mode.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._mode is None or self._mode == mode)
            if reasons := environment_reasons(mode, self._environ):
                raise AiterEnvironmentError("; ".join(map(str, reasons)))
            if self._inside == 0:
                self._mode = mode
                self._before = {name: self._environ.get(name) for name in mode.environment}
                self._environ.update(mode.environment)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                if self._inside == 0:
                    self._restore()
                    self._mode = None
                    self._condition.notify_all()

    def _restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                self._environ.pop(name, None)
            else:
                self._environ[name] = value


#: One for the process: the environment is the process's.
MODE_GATE = ModeGate()


def call_fused_moe(
    handle: AiterHandle,
    mode: Mode,
    layout: AiterLayout,
    *,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    beta: float,
    linear_beta: float,
) -> torch.Tensor:
    """Call AITER with every optional argument by name and nothing left to a default that changes between versions.

    x:             (T, H padded) bf16
    w1, w2:        (E, 2I, H/2), (E, H, I/2) float4_e2m1fn_x2, shuffled
    w1_scale, w2_scale:  (E*2I, H/32), (E*H, I/32) uint8, shuffled, columns rounded up to 8
    topk_weights, topk_ids:  (T, K) float32, int32, ids 0 ... E-1
    returns        (T, H padded) of x's dtype

    `is_shuffled` decides the kernel and is a Python attribute that views, `.data` and `nn.Parameter` lose, so it is set
    on the very objects that are passed.
    """
    w1.is_shuffled = True  # type: ignore[attr-defined]
    w2.is_shuffled = True  # type: ignore[attr-defined]
    with MODE_GATE.hold(mode):
        return handle.fused_moe(
            x,
            w1,
            w2,
            topk_weights,
            topk_ids,
            expert_mask=None,
            activation=handle.situv2,
            quant_type=handle.per_1x32,
            doweight_stage1=False,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            a1_scale=None,
            a2_scale=None,
            block_size_M=None,
            num_local_tokens=None,
            moe_sorting_dispatch_policy=0,
            dtype=x.dtype,
            hidden_pad=layout.hidden_pad,
            intermediate_pad=layout.intermediate_pad,
            bias1=None,
            bias2=None,
            splitk=0,
            swiglu_limit=None,
            beta=beta,
            linear_beta=linear_beta,
            gate_mode=mode.gate_mode,
        )
