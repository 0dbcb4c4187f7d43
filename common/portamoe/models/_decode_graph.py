"""One call of a block for a fixed number of tokens, captured as a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

#: Eager calls before the capture: compile, load, and let the allocators settle.
_WARM_UPS = 2


class DecodeGraph:
    """A captured call `output = run(input)`.

    input, output:  (T, D), its own buffers; `output` holds until the next replay

    The copy into `input` is no part of the graph, so the first node of the graph is a kernel: a kernel that is launched
    programmatically dependent must not stand behind a copy.
    """

    def __init__(
        self,
        run: Callable[[torch.Tensor], torch.Tensor],
        tokens: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.input = torch.zeros(tokens, width, dtype=dtype, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run(self.input)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.output = run(self.input)

    def replay(self) -> torch.Tensor:
        """Run on what `input` holds, on the current stream; returns `output`."""
        self._graph.replay()
        return self.output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Copy x (T, D) into `input` and replay."""
        self.input.copy_(x)
        return self.replay()
