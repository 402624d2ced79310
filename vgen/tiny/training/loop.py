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
from vgen.tiny.training.store import load_state, part_of, save_state

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

    def __call__(self, step: int, generator: torch.Generator) -> Losses:
        return self.losses(self.draw(step, generator))


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
    warmed = min(1.0, (step + 1) / settings.warmup_steps)
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


def _log(training: Training, values: Losses, path: Path, log: Callable[[Mapping[str, Any], int], None]) -> None:
    numbers = {name: float(value.detach()) for name, value in values.items()}
    if not math.isfinite(numbers["loss"]):
        raise FloatingPointError(f"the loss of step {training.step} is {numbers['loss']}; lower the learning rate")
    append(path.with_suffix(".jsonl"), {"step": training.step, "time_s": round(time.time(), 2), **numbers})
    log({f"{path.stem}/{name}": number for name, number in numbers.items()}, training.step)


def append(path: Path, row: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def averaged(training: Training) -> dict[str, Tensor]:
    """The module's tensors by name, parameters as their averages."""
    average = dict(zip(map(id, training.parameters), training.average, strict=True))
    return {name: average.get(id(t), t.detach()) for name, t in training.module.state_dict(keep_vars=True).items()}


def store(training: Training, path: Path) -> None:
    state = training.optimizer.state_dict()["state"]
    moments = {f"optimizer.{index}.{name}": value for index, one in state.items() for name, value in one.items()}
    weights = {f"weights.{name}": tensor for name, tensor in training.module.state_dict().items()}
    average = {f"average.{name}": tensor for name, tensor in averaged(training).items()}
    save_state(path, {**weights, **average, **moments}, training.step)


def store_buffers(module: nn.Module, path: Path) -> None:
    """Put the buffers of ``module`` beside the averages at ``path``; the weights to go on from keep theirs."""
    tensors, step = load_state(path)
    save_state(path, {**tensors, **{f"average.{name}": buffer for name, buffer in module.named_buffers()}}, step)


def restore(training: Training, path: Path) -> None:
    """Go on from the state at ``path``, if there is one, in place."""
    if not path.is_file():
        return
    tensors, training.step = load_state(path)
    training.module.load_state_dict(part_of(tensors, "weights."))
    names = {id(tensor): name for name, tensor in training.module.state_dict(keep_vars=True).items()}
    for parameter, average in zip(training.parameters, training.average, strict=True):
        average.copy_(tensors[f"average.{names[id(parameter)]}"])
    numbered = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in part_of(tensors, "optimizer.").items():
        index, _, key = name.partition(".")
        parameter = numbered[int(index)]
        # In the memory order of the parameter, as the fused optimizer expects.
        same = tensor if tensor.shape != parameter.shape else torch.empty_like(parameter).copy_(tensor)
        moments.setdefault(int(index), {})[key] = same.detach()
    training.optimizer.load_state_dict({**training.optimizer.state_dict(), "state": moments})
