"""One stage's state on disk: weights, their moving average, the optimizer's moments and the step, in one file."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vgen.typed import ConfigurationError


def save_state(path: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Write all or nothing: a run that dies here leaves the state before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    # Copies, since a moving average may share its memory with the weights before the first step; contiguous, since
    # the file knows no other order.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, partial, {"step": str(step)})
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(path)


def load_state(path: Path) -> tuple[dict[str, Tensor], int]:
    """All tensors, on the CPU, and the number of steps done."""
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, int(file.metadata()["step"])  # noqa: SIM118


def load_average(folder: Path, stage: str) -> dict[str, Tensor]:
    """The averaged weights of a stage, by their names in its module.

    Raises:
        ConfigurationError: the stage was not trained in this folder, or not to its end.
    """
    path = folder / f"{stage}.safetensors"
    if not path.is_file():
        raise ConfigurationError(f"there is no {path}; run train.stage={stage} with this train.folder first")
    tensors, step = load_state(path)
    average = part_of(tensors, "average.")
    if average.keys() != part_of(tensors, "weights.").keys():
        raise ConfigurationError(f"{path} was left at step {step}; run train.stage={stage} again, which goes on there")
    return average


def fill(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load ``tensors``, which are of the state at ``path``, into ``module``.

    Raises:
        ConfigurationError: names or shapes are not those of ``module``.
    """
    own = module.state_dict()
    other = sorted(own.keys() ^ tensors.keys()) or [name for name in own if own[name].shape != tensors[name].shape]
    if other:
        raise ConfigurationError(
            f"{path} is of another architecture, which shows in '{other[0]}'; use that one or another train.folder"
        )
    module.load_state_dict(tensors)


def part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
