"""The plan's kernels as `portamoe.linear` asks for them, and the lines of the probe about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cuda_moe.skinny import registry
from cuda_moe.skinny.plan import KERNELS, PlanError, arch_name, load_plan
from portamoe.linear_provider import Candidate, LinearTable

if TYPE_CHECKING:
    import torch

    from cuda_moe.skinny.plan import Choice
    from portamoe.device import Device
    from portamoe.linear_provider import Kernel, Timed


class SkinnyProvider:
    """Kernels of the plan of an NVIDIA device's compute capability."""

    name = "skinny"

    def table(self, n: int, k: int, device: Device) -> LinearTable | None:
        """Return the kernels for bf16 weights (N, K) on `device`, None where the plan has nothing for them.

        Raises PlanError for a plan file that is wrong.
        """
        import torch

        plan = load_plan(device.capability) if device.capability else None
        if plan is None or (n, k) not in plan.entries:
            return None
        at = torch.device(device.torch_name)

        def usable(kernel: str) -> bool:
            return registry.reason(kernel, device) is None

        def bound(choices: tuple[Choice | None, ...]) -> tuple[Kernel | None, ...]:
            return tuple(registry.bind(c, n, k, m, at) if c else None for m, c in enumerate(choices, start=1))

        choices = plan.resolve(n, k, usable)
        names = tuple(choice.kernel if choice else "torch" for choice in choices)
        kernels, dependent = bound(choices), bound(plan.resolve(n, k, usable, dependent=True))
        either = tuple(
            d or (_ordinary(kernel) if kernel else None) for d, kernel in zip(dependent, kernels, strict=True)
        )
        return LinearTable(kernels, names, either)

    def lines(self, device: Device) -> tuple[str, ...]:
        """Return whose winners serve `device`, and which kernels cannot run there and why."""
        capability = device.capability
        if capability is None:
            return ()
        try:
            plan = load_plan(capability)
        except PlanError as error:
            return (f"linear: {error}",)
        if plan is None:
            return (f"linear: no plan for {device.arch}; torch serves every projection",)
        missing: dict[str, list[str]] = {}
        for name in KERNELS:
            if why := registry.reason(name, device):
                missing.setdefault(str(why), []).append(name)
        without = (f"linear: without {', '.join(names)}: {why}" for why, names in missing.items())
        return (f"linear: {plan.line()}", *without)

    def shapes(self, device: Device) -> tuple[tuple[int, int], ...]:
        """Return (N, K) of every projection of the plan, Hopper's where `device` has none."""
        plan = (load_plan(device.capability) if device.capability else None) or load_plan((9, 0))
        return tuple(plan.entries) if plan else ()

    def candidates(self, n: int, k: int, m: int, device: Device) -> list[Candidate]:
        """Return the kernels of every implementation that can run on `device`, with the parameters worth timing."""
        import torch

        from cuda_moe.skinny.tuning import candidates

        usable = {name for name in KERNELS if registry.reason(name, device) is None}
        at = torch.device(device.torch_name)
        return [
            Candidate(f"{c.kernel} {c.parameters}", registry.bind(c, n, k, m, at), c)
            for c in candidates(n, k, m)
            if c.kernel in usable
        ]

    def plan(
        self,
        device: Device,
        about: Mapping[str, Any],
        timed: Sequence[Timed],
        torch_us: Mapping[tuple[int, int, int], float],
    ) -> tuple[str, str]:
        """Return name and text of the plan file of a tuning run; raises ValueError for what is no NVIDIA device."""
        from cuda_moe.skinny.tuning import document, to_json

        if device.capability is None:
            raise ValueError(f"{device.arch} has no CUDA compute capability, so no plan of these kernels")
        arch = arch_name(device.capability)
        return f"linear-{arch}.json", to_json(document(arch, about, timed, torch_us))


def _ordinary(kernel: Kernel) -> Kernel:
    """Return the kernel, launched after the one before it has ended whatever is asked: always right, and measured."""

    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        pdl: bool = False,  # noqa: ARG001 - the kernels' common signature
    ) -> None:
        kernel(x, weight, out, residual)

    return call


PROVIDER = SkinnyProvider()
