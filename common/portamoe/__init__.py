"""Routed experts of Kimi-K3-class models on AMD and NVIDIA GPUs: MXFP4 and NVFP4 weights, one API.

`portamoe.selected` is the backend chosen at import for Kimi-K3's routed experts on the first visible device, with the
reasons for and against every backend. Importing reads sysfs and NVML; it imports neither torch nor a vendor package and
makes no GPU context, so forking afterwards is safe. What works on tensors is imported when it is first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from portamoe.activations import Activation, GeGLU, ReLU2, SiTU, SwiGLU, SwiGLUOAI, SwiGLUStep
from portamoe.decision import Accepted, BackendRejected, Decision, Reason, Rejected
from portamoe.detection import Detection, DetectionError, detect
from portamoe.detection.distributions import version
from portamoe.device import Device, Host
from portamoe.probe import Capabilities, capabilities
from portamoe.registry import Selection, being_imported, choose_at_import, decide, select
from portamoe.spec import GPT_OSS, KIMI_K3, MoESpec, load_spec

if TYPE_CHECKING:
    from portamoe import distributed, formats, layouts, reference, routing, testing
    from portamoe.checkpoints import load_experts
    from portamoe.layer import RoutedExperts
    from portamoe.projections import LinearPlan, linear
    from portamoe.weights import Expert, ExpertSource, ExpertWeights

    __version__: str
    #: The choice for Kimi-K3's routed experts on the first visible device, made at import.
    selected: Selection

#: Name -> module that defines it, imported at first use; None: the module of that name itself.
_LAZY: dict[str, str | None] = {
    "load_experts": "portamoe.checkpoints",
    "RoutedExperts": "portamoe.layer",
    "Expert": "portamoe.weights",
    "ExpertSource": "portamoe.weights",
    "ExpertWeights": "portamoe.weights",
    "LinearPlan": "portamoe.projections",
    "linear": "portamoe.projections",
    "distributed": None,
    "formats": None,
    "layouts": None,
    "reference": None,
    "routing": None,
    "testing": None,
}

__all__ = [
    "GPT_OSS",
    "KIMI_K3",
    "Accepted",
    "Activation",
    "BackendRejected",
    "Capabilities",
    "Decision",
    "Detection",
    "DetectionError",
    "Device",
    "Expert",
    "ExpertSource",
    "ExpertWeights",
    "GeGLU",
    "Host",
    "LinearPlan",
    "MoESpec",
    "ReLU2",
    "Reason",
    "Rejected",
    "RoutedExperts",
    "Selection",
    "SiTU",
    "SwiGLU",
    "SwiGLUOAI",
    "SwiGLUStep",
    "__version__",
    "capabilities",
    "decide",
    "detect",
    "distributed",
    "formats",
    "layouts",
    "linear",
    "load_experts",
    "load_spec",
    "reference",
    "routing",
    "select",
    "selected",
    "testing",
]


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would believe in every name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return version("portamoe") or "0+unknown"  # unknown: run from a source tree
        if name == "selected":
            return globals().setdefault(name, choose_at_import())
        if name not in _LAZY:
            raise AttributeError(f"module 'portamoe' has no attribute {name!r}")
        module = importlib.import_module(_LAZY[name] or f"portamoe.{name}")
        return module if _LAZY[name] is None else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A backend whose own import led here cannot be asked yet: then the choice is made when it is first read.
if not being_imported():
    selected = choose_at_import()
