"""How the passes of one step are run: the seam between a family's prediction and the ranks that it has."""

from collections.abc import Callable, Mapping

from torch import Tensor

Outputs = tuple[Tensor | None, ...]
"""What a pass predicts, one tensor per stream; None for a stream that is not there."""

RunPasses = Callable[[Mapping[str, Callable[[], Outputs]]], Mapping[str, Outputs]]
"""The passes of a step by name to what each predicts; ``vgen.parallel.guidance`` spreads them over ranks."""


def run_serially(passes: Mapping[str, Callable[[], Outputs]]) -> Mapping[str, Outputs]:
    """One after another, in their order."""
    return {name: run() for name, run in passes.items()}
