"""Wan's denoising loop: host numbers decide everything, the latents stay in fp32.

Shapes: B batch (1), C latent channels, T latent frames, h, w latent height and width, S video tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from vgen.diffusion.flow_match import History, advance
from vgen.diffusion.wan_guidance import Expert, StepPlan
from vgen.models.wan.conditioning import hold
from vgen.models.wan.geometry import Geometry
from vgen.models.wan.patches import patchify, unpatchify
from vgen.models.wan.transformer import PreparedContext, Stream, WanTransformer
from vgen.residency import Residency
from vgen.stages.run_passes import Outputs, RunPasses, run_serially
from vgen.stages.wan_condition import WanInputs

PARTS: dict[Expert, str] = {"high_noise": "transformer", "low_noise": "transformer_2"}
"""The experts' names among the components."""

Predict = Callable[[Tensor, StepPlan], Tensor]
"""Latents ``[1, C, T, h, w]`` fp32 and a step to the guided velocity, of the same shape and dtype."""


@dataclass(frozen=True, eq=False)
class WanConditioning:
    """What stays the same over the steps of one request. ``negative`` is None where no step is guided."""

    geometry: Geometry
    positive: Tensor
    negative: Tensor | None
    inputs: WanInputs


class MakePredict(Protocol):
    def __call__(self, expert: Expert, conditioning: WanConditioning) -> Predict: ...


def denoise(
    make_predict: MakePredict,
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
    held, history, step = conditioning.inputs.held, History(), 0
    for expert, group, following in _by_expert(plans):
        with residency.use(PARTS[expert]):
            predict = make_predict(expert, conditioning)
            for plan in group:
                if plan is group[-1] and following is not None:
                    residency.prefetch(PARTS[following])
                latents = latents if held is None else hold(latents, held)
                x0 = latents - plan.sigma * predict(latents, plan)
                latents, history = advance(latents, x0, plan.weights, history)
                on_step(step, latents)
                step += 1
            del predict
    return latents if held is None else hold(latents, held)


def _by_expert(plans: Sequence[StepPlan]) -> Iterator[tuple[Expert, list[StepPlan], Expert | None]]:
    """Each expert with its steps and the expert after it."""
    groups = [(expert, list(steps)) for expert, steps in groupby(plans, key=lambda plan: plan.expert)]
    for index, (expert, steps) in enumerate(groups):
        yield expert, steps, groups[index + 1][0] if index + 1 < len(groups) else None


def build_serial_predict(
    transformer: WanTransformer, conditioning: WanConditioning, run_passes: RunPasses = run_serially
) -> Predict:
    """Guidance passes one after another, or as ``run_passes`` has them run; their difference in fp32.

    What no step changes is computed here, once for the request and the expert.
    """
    geometry, inputs = conditioning.geometry, conditioning.inputs
    device, dtype = conditioning.positive.device, conditioning.positive.dtype
    rope = transformer.rope_tables(geometry, device)
    with torch.no_grad():
        positive = transformer.prepare_text(conditioning.positive, inputs.tokens)
        negative = None
        if conditioning.negative is not None:
            negative = transformer.prepare_text(conditioning.negative, inputs.tokens)
    condition = None if inputs.channels is None else patchify(inputs.channels.to(dtype), geometry)
    held = inputs.held

    def forward(latents: Tensor, timestep: float, context: PreparedContext) -> Outputs:
        tokens = patchify(latents.to(dtype), geometry)
        if condition is not None:
            tokens = torch.cat([tokens, condition], dim=2)
        told = torch.full((1,), timestep, device=device)
        rows = None
        if held is not None:
            told, rows = (held.levels * timestep).unsqueeze(0), held.rows
        with torch.no_grad():
            velocity: Tensor = transformer(Stream(tokens, told, context, rows=rows), rope)
        return (unpatchify(velocity, geometry).float(),)

    def predict(latents: Tensor, plan: StepPlan) -> Tensor:
        passes = {"cond": partial(forward, latents, plan.timestep, positive)}
        if plan.guidance != 1:
            assert negative is not None
            passes["uncond"] = partial(forward, latents, plan.timestep, negative)
        outputs = run_passes(passes)
        (velocity,) = outputs["cond"]
        assert velocity is not None
        if plan.guidance == 1:
            return velocity
        (unguided,) = outputs["uncond"]
        assert unguided is not None
        return unguided + plan.guidance * (velocity - unguided)

    return predict
