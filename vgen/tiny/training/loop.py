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
from vgen.tiny.training.store import load_state, part_of, save_state

WARMUP = 0.03
"""Part of the steps in which the learning rate rises."""

FINAL_RATE = 0.02
"""Part of the learning rate that is left at the end."""

LARGEST_GRADIENT = 1.0
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.98)
AVERAGE_DECAY = 0.999

SAVE_EVERY_S = 45.0
LOG_EVERY = 25

Losses = Mapping[str, Tensor]
"""Scalars by name; ``loss`` is what is minimised."""

LossOf = Callable[[int, torch.Generator], Losses]
"""The losses of one step from its number and its own random numbers, which are on the device."""


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
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=parameters[0].is_cuda)
    average = [parameter.detach().clone() for parameter in parameters]
    return Training(module, optimizer, average, parameters=parameters)


def train(
    training: Training,
    loss_of: LossOf,
    settings: StageTraining,
    *,
    path: Path,
    seed: int,
    log: Callable[[Mapping[str, Any], int], None] = lambda *_: None,
    stop: Callable[[int], bool] = lambda _: False,
) -> None:
    """Run to ``settings.steps``, from the state at ``path`` if there is one; ``stop(step)`` ends it sooner, stored."""
    restore(training, path)
    device = training.parameters[0].device
    saved = time.perf_counter()
    training.module.train()
    while training.step < settings.steps:
        step = training.step
        generator = torch.Generator(device).manual_seed(step_seed(seed, path.stem, step))
        with autocast(device, settings.autocast):
            losses = loss_of(step, generator)
        gradient = _descend(training, losses["loss"], settings)
        if step % LOG_EVERY == 0 or training.step == settings.steps:
            _log(training, {**losses, "gradient": gradient}, path, log)
        if training.step == settings.steps or stop(training.step):
            break
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
    warmup = max(1, round(WARMUP * settings.steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return settings.learning_rate * min(1.0, (step + 1) / warmup) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def _descend(training: Training, loss: Tensor, settings: StageTraining) -> Tensor:
    for group in training.optimizer.param_groups:
        group["lr"] = rate(training.step, settings)
    training.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    gradient = nn.utils.clip_grad_norm_(training.parameters, LARGEST_GRADIENT)
    training.optimizer.step()
    training.step += 1
    # Young averages forget sooner, or they would be of the first weights.
    decay = min(AVERAGE_DECAY, training.step / (training.step + 10))
    with torch.no_grad():
        torch._foreach_lerp_(training.average, [p.detach() for p in training.parameters], 1 - decay)
    return gradient


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
