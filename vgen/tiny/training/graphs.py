"""A training step as CUDA graphs: these models are so small that eager mode only waits for kernels to be launched."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_STEPS = 2
"""Steps of each set of shapes that run eagerly first: they choose algorithms and fill what is computed once."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    outputs: Mapping[str, Tensor]


class GraphedStep:
    """``step`` of a batch, eagerly at first, then as one graph for each set of shapes; both do the same kernels.

    ``step`` must read what changes from its batch or from tensors that stay where they are. What it returns is
    overwritten by the next call.
    """

    def __init__(self, step: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> None:
        self.step = step
        self._calls: dict[object, int] = {}
        self._captured: dict[object, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())
        calls = self._calls[shapes] = self._calls.get(shapes, 0) + 1
        if calls <= WARM_STEPS:
            return self._run_aside(batch)
        captured = self._captured.get(shapes)
        if captured is None:
            captured = self._captured[shapes] = self._capture(batch)
        for name, tensor in batch.items():
            captured.inputs[name].copy_(tensor)
        captured.graph.replay()
        return captured.outputs

    def _run_aside(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # On another stream than the default one, as a capture is: autograd remembers the stream.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            outputs = self.step(batch)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        return outputs

    def _capture(self, batch: Mapping[str, Tensor]) -> _Captured:
        inputs = {name: tensor.clone() for name, tensor in batch.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self.step(inputs)
        return _Captured(graph, inputs, outputs)
