"""Wan's denoising loop: its numbers are known before it starts, the latents stay in fp32.

Shapes: B batch (1), C latent channels, T latent frames, h, w latent height and width, S video tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from vgen.diffusion.flow_match import History, StepWeights, advance
from vgen.diffusion.wan_guidance import Expert, StepPlan
from vgen.models.attention import Rope
from vgen.models.wan.conditioning import HeldFrames, hold
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.patches import patchify, unpatchify
from vgen.models.wan.transformer import PreparedContext, Stream, WanTransformer
from vgen.residency import Residency
from vgen.stages.run_passes import Outputs, RunPasses, run_serially
from vgen.stages.wan_condition import WanInputs

PARTS: dict[Expert, str] = {"high_noise": "transformer", "low_noise": "transformer_2"}
"""The experts' names among the components."""


@dataclass(frozen=True, eq=False)
class WanConditioning:
    """What stays the same over the steps of one request. ``negative`` is None where no step is guided."""

    geometry: Geometry
    positive: Tensor
    negative: Tensor | None
    inputs: WanInputs


@dataclass(frozen=True, eq=False)
class StepNumbers:
    """The numbers of one step on the latents' device, fp32: ``sigma`` ``[]``, ``timestep`` ``[1]``, and the solver's
    weights, ``[terms]`` each."""

    sigma: Tensor
    timestep: Tensor
    weights: StepWeights


def step_numbers(plans: Sequence[StepPlan], device: torch.device) -> tuple[StepNumbers, ...]:
    """Of all steps, in one copy to ``device``, so that no step of the loop copies anything."""
    rows = [(plan.sigma, plan.timestep, *plan.weights.corrected, *plan.weights.next) for plan in plans]
    values = torch.tensor([number for row in rows for number in row], dtype=torch.float32).to(device)
    numbers = []
    for plan, row in zip(plans, values.split(list(map(len, rows))), strict=True):
        corrected, following = row[2:].split([len(plan.weights.corrected), len(plan.weights.next)])
        numbers.append(StepNumbers(row[0], row[1:2], StepWeights(corrected, following)))
    return tuple(numbers)


Step = Callable[[Tensor, History, StepPlan, StepNumbers], tuple[Tensor, History]]
"""Latents ``[1, C, T, h, w]`` fp32, what the last step left, and a step, to the next latents and what it leaves."""


class MakeStep(Protocol):
    def __call__(self, expert: Expert, conditioning: WanConditioning) -> Step: ...


def denoise(
    make_step: MakeStep,
    conditioning: WanConditioning,
    latents: Tensor,
    plans: Sequence[StepPlan],
    residency: Residency,
    on_step: Callable[[int, Tensor], None] = lambda *_: None,
) -> Tensor:
    """Clean latents ``[1, C, T, h, w]`` fp32 from noise of that shape.

    An expert is on the device for its steps only, where it is not there anyway; the next one comes during the last of
    them if there is room. The solver's history goes on from one to the other.
    """
    held, history, index = conditioning.inputs.held, History(), 0
    numbers = step_numbers(plans, latents.device)
    for expert, group, following in _by_expert(plans):
        with residency.use(PARTS[expert]):
            step = make_step(expert, conditioning)
            for plan in group:
                if plan is group[-1] and following is not None:
                    residency.prefetch(PARTS[following])
                latents, history = step(latents, history, plan, numbers[index])
                on_step(index, latents)
                index += 1
            del step
    return latents if held is None else hold(latents, held)


def _by_expert(plans: Sequence[StepPlan]) -> Iterator[tuple[Expert, list[StepPlan], Expert | None]]:
    """Each expert with its steps and the expert after it."""
    groups = [(expert, list(steps)) for expert, steps in groupby(plans, key=lambda plan: plan.expert)]
    for index, (expert, steps) in enumerate(groups):
        yield expert, steps, groups[index + 1][0] if index + 1 < len(groups) else None


@dataclass(frozen=True, eq=False)
class StepConstants:
    """What a step reads and no step changes: numbers and tensors only, as a captured step needs.

    ``positive``, ``negative``: as ``WanTransformer.prepare_text`` made them. ``condition``: channels behind the noisy
    latents, in tokens.
    """

    geometry: Geometry
    positive: PreparedContext
    negative: PreparedContext | None
    rope: Rope
    condition: Tensor | None
    held: HeldFrames | None
    dtype: torch.dtype


RunStep = Callable[[StepConstants, Tensor, History, StepNumbers, float], tuple[Tensor, History]]
"""``run_step`` of one transformer and one way to run passes."""


def build_serial_step(
    transformer: WanTransformer, conditioning: WanConditioning, run_passes: RunPasses = run_serially
) -> Step:
    """Guidance passes one after another, or as ``run_passes`` has them run."""
    return build_step(partial(run_step, transformer, run_passes), transformer, conditioning)


def build_step(run: RunStep, transformer: WanTransformer, conditioning: WanConditioning) -> Step:
    """The steps of one request and one expert by ``run``, which may be captured.

    What no step changes is computed here, once.
    """
    geometry, inputs = conditioning.geometry, conditioning.inputs
    device, dtype = conditioning.positive.device, conditioning.positive.dtype
    with torch.no_grad():
        positive = transformer.prepare_text(conditioning.positive, inputs.tokens)
        negative = None
        if conditioning.negative is not None:
            negative = transformer.prepare_text(conditioning.negative, inputs.tokens)
    constants = StepConstants(
        geometry,
        positive,
        negative,
        transformer.rope_tables(geometry, device),
        None if inputs.channels is None else patchify(inputs.channels.to(dtype), geometry),
        inputs.held,
        dtype,
    )

    def step(latents: Tensor, history: History, plan: StepPlan, numbers: StepNumbers) -> tuple[Tensor, History]:
        return run(constants, latents, history, numbers, plan.guidance)

    return step


def run_step(
    transformer: WanTransformer,
    run_passes: RunPasses,
    constants: StepConstants,
    latents: Tensor,
    history: History,
    numbers: StepNumbers,
    guidance: float,
) -> tuple[Tensor, History]:
    """One step: the next latents and the solver's history. The passes differ by ``guidance`` in fp32.

    Of its arguments alone, with no look at the device, so that all of it can be one graph.
    """
    if constants.held is not None:
        latents = hold(latents, constants.held)
    passes = {"cond": partial(_forward, transformer, constants, latents, numbers.timestep, constants.positive)}
    if guidance != 1:
        assert constants.negative is not None
        passes["uncond"] = partial(_forward, transformer, constants, latents, numbers.timestep, constants.negative)
    outputs = run_passes(passes)
    (velocity,) = outputs["cond"]
    assert velocity is not None
    if guidance != 1:
        (unguided,) = outputs["uncond"]
        assert unguided is not None
        velocity = unguided + guidance * (velocity - unguided)
    return advance(latents, latents - numbers.sigma * velocity, numbers.weights, history)


def _forward(
    transformer: WanTransformer, constants: StepConstants, latents: Tensor, timestep: Tensor, context: PreparedContext
) -> Outputs:
    """The velocity ``[1, C, T, h, w]`` fp32 of one pass."""
    tokens = patchify(latents.to(constants.dtype), constants.geometry)
    if constants.condition is not None:
        tokens = torch.cat([tokens, constants.condition], dim=2)
    rows = None
    if constants.held is not None:
        timestep, rows = (constants.held.levels * timestep).unsqueeze(0), constants.held.rows
    with torch.no_grad():
        velocity: Tensor = transformer(Stream(tokens, timestep, context, rows=rows), constants.rope)
    return (unpatchify(velocity, constants.geometry).float(),)
