"""The training loop of any stage: AdamW, warm-up and cosine, clipped gradients, moving averages, and going on.

A step depends on its number and the seed alone, so a run that was interrupted ends with the very same weights.
"""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vgen.config import StageTraining
from vgen.tiny.training.graphs import GraphedStep
from vgen.tiny.training.store import fill, load_state, part_of, save_state

FINAL_RATE = 0.02
"""Part of the learning rate that is left at the end."""

LARGEST_GRADIENT = 1.0
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.98)
AVERAGE_DECAY = 0.999

SAVE_EVERY_S = 45.0
LOG_EVERY = 25
LOOKS = 4
"""Times that samples are made, the last with the averages when a stage ends."""

Losses = Mapping[str, Tensor]
"""Scalars by name; ``loss`` is what is minimised."""

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """What a stage minimises."""

    draw: Callable[[int, torch.Generator], Batch]
    """What one step is about, from its number and its own random numbers, which are on the device."""
    losses: Callable[[Batch], Losses]
    """Of it. Draws nothing and waits for nothing, so that a CUDA graph can hold it."""


@dataclass
class Training:
    """A module in training. ``average``: of its parameters, in their order."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: list[Tensor]
    step: int = 0
    parameters: list[nn.Parameter] = field(default_factory=list)


def begin(module: nn.Module, settings: StageTraining) -> Training:
    """Every parameter of ``module`` that requires a gradient, from the start."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    plain = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    device = parameters[0].device
    graphed = device.type == "cuda"
    # In a graph the rate is read where it lies.
    first_rate = torch.tensor(settings.learning_rate, device=device) if graphed else settings.learning_rate
    optimizer = torch.optim.AdamW(groups, lr=first_rate, betas=BETAS, fused=graphed, capturable=graphed)
    average = [parameter.detach().clone() for parameter in parameters]
    return Training(module, optimizer, average, parameters=parameters)


def train(
    training: Training,
    objective: Objective,
    settings: StageTraining,
    *,
    path: Path,
    seed: int,
    log: Callable[[Mapping[str, Any], int], None] = lambda *_: None,
    stop: Callable[[int], bool] = lambda _: False,
    look: Callable[[int], None] = lambda _: None,
) -> None:
    """Run to ``settings.steps``, from the state at ``path`` if there is one; ``stop(step)`` ends it sooner, stored.

    ``look(step)`` is called a few times on the way, when the module's weights are those of the step.
    """
    restore(training, path)
    device = training.parameters[0].device
    saved = time.perf_counter()
    training.module.train()

    def descend(batch: Batch) -> Losses:
        with autocast(device, settings.autocast):
            losses = objective.losses(batch)
        gradient = _descend(training, losses["loss"])
        # Without their graph, which would keep the step's memory and streams alive.
        return {name: value.detach() for name, value in {**losses, "gradient": gradient}.items()}

    descend_step = GraphedStep(descend) if device.type == "cuda" else descend
    while training.step < settings.steps:
        step = training.step
        generator = torch.Generator(device).manual_seed(step_seed(seed, path.stem, step))
        batch = objective.draw(step, generator)
        _set_rate(training, rate(step, settings))
        losses = descend_step(batch)
        _advance(training)
        if step % LOG_EVERY == 0 or training.step == settings.steps:
            _log(training, losses, path, log)
        if training.step == settings.steps or stop(training.step):
            break
        if training.step % max(1, settings.steps // LOOKS) == 0:
            training.module.eval()
            look(training.step)
            training.module.train()
        if time.perf_counter() - saved > SAVE_EVERY_S:
            _numbers(training, losses, path)  # a state with weights that are no numbers could not go on
            store(training, path)
            saved = time.perf_counter()
    store(training, path)


def step_seed(seed: int, name: str, step: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def autocast(device: torch.device, enabled: bool) -> contextlib.AbstractContextManager[Any]:
    if enabled and device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def rate(step: int, settings: StageTraining) -> float:
    """The learning rate of a step, from 0."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    warmed = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    return settings.learning_rate * warmed * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def _set_rate(training: Training, value: float) -> None:
    for group in training.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def _descend(training: Training, loss: Tensor) -> Tensor:
    training.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    gradient = nn.utils.clip_grad_norm_(training.parameters, LARGEST_GRADIENT)
    training.optimizer.step()
    return gradient


def _advance(training: Training) -> None:
    training.step += 1
    # Young averages forget sooner, or they would be of the first weights.
    decay = min(AVERAGE_DECAY, training.step / (training.step + 10))
    with torch.no_grad():
        torch._foreach_lerp_(training.average, [p.detach() for p in training.parameters], 1 - decay)


def _numbers(training: Training, values: Losses, path: Path) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items()}
    for name in ("loss", "gradient"):
        if not math.isfinite(numbers[name]):
            raise FloatingPointError(
                f"the {name} of step {training.step} is {numbers[name]}; lower "
                f"train.stages.{path.stem}.learning_rate and go on from the last state"
            )
    return numbers


def _log(training: Training, values: Losses, path: Path, log: Callable[[Mapping[str, Any], int], None]) -> None:
    numbers = _numbers(training, values, path)
    append(path.with_suffix(".jsonl"), {"step": training.step, "time_s": round(time.time(), 2), **numbers})
    log({f"{path.stem}/{name}": number for name, number in numbers.items()}, training.step)


def append(path: Path, row: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def store(training: Training, path: Path) -> None:
    """Put the state at ``path``; averages are of parameters alone, buffers join them when a stage ends."""
    state = training.optimizer.state_dict()["state"]
    moments = {f"optimizer.{index}.{name}": value for index, one in state.items() for name, value in one.items()}
    weights = {f"weights.{name}": tensor for name, tensor in training.module.state_dict().items()}
    names = _parameter_names(training)
    average = {f"average.{name}": tensor for name, tensor in zip(names, training.average, strict=True)}
    save_state(path, {**weights, **average, **moments}, training.step)


def _parameter_names(training: Training) -> list[str]:
    names = {id(tensor): name for name, tensor in training.module.state_dict(keep_vars=True).items()}
    return [names[id(parameter)] for parameter in training.parameters]


def store_buffers(module: nn.Module, path: Path) -> None:
    """Put the buffers of ``module`` beside the averages at ``path``; the weights to go on from keep theirs.

    With them the stage has ended: ``load_average`` asks for them.
    """
    tensors, step = load_state(path)
    parameters = dict(module.named_parameters())
    buffers = {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}
    save_state(path, {**tensors, **{f"average.{name}": buffer for name, buffer in buffers.items()}}, step)


def restore(training: Training, path: Path) -> None:
    """Go on from the state at ``path``, if there is one, in place."""
    if not path.is_file():
        return
    tensors, training.step = load_state(path)
    fill(training.module, part_of(tensors, "weights."), path)
    for name, average in zip(_parameter_names(training), training.average, strict=True):
        average.copy_(tensors[f"average.{name}"])
    numbered = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in part_of(tensors, "optimizer.").items():
        index, _, key = name.partition(".")
        parameter = numbered[int(index)]
        # In the memory order of the parameter, as the fused optimizer expects.
        same = tensor if tensor.shape != parameter.shape else torch.empty_like(parameter).copy_(tensor)
        moments.setdefault(int(index), {})[key] = same.detach()
    training.optimizer.load_state_dict({**training.optimizer.state_dict(), "state": moments})
