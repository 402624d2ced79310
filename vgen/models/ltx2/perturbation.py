"""Which attentions a guidance pass leaves out: per sample and block as data, then as masks that the blocks read.

Shapes: B samples.
Source: Lightricks/LTX-2 at 400fd31, ``guidance/perturbations.py`` and ``model/transformer/transformer_args.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from vgen.models.attention import Keep

Blocks: TypeAlias = tuple[int, ...] | Literal["all"]
"""Numbers of transformer blocks, or every one."""


@dataclass(frozen=True)
class Perturbation:
    """What one sample leaves out, and in which blocks. The default leaves out nothing.

    A self-attention left out passes its values on: value projection, gate and output projection still run. Attention
    to the other stream left out adds nothing.
    """

    skip_video_self: Blocks = ()
    skip_audio_self: Blocks = ()
    skip_audio_to_video: Blocks = ()
    skip_video_to_audio: Blocks = ()


@dataclass(frozen=True, eq=False)
class BlockKeep:
    """What one block keeps: True for all samples, False for none, else bool [B, 1, 1].

    Being bools of Python, the first two choose the code that runs without asking the device.
    """

    video_self: Keep = True
    audio_self: Keep = True
    audio_to_video: Keep = True
    video_to_audio: Keep = True


@dataclass(frozen=True, eq=False)
class PerturbationPlan:
    """The perturbations of ``num_samples`` samples by block; None: nothing is left out, of any number of samples."""

    blocks: tuple[BlockKeep, ...]
    num_samples: int | None


def plan_perturbations(
    perturbations: Sequence[Perturbation], num_layers: int, device: torch.device | str
) -> PerturbationPlan:
    """Flags and masks of ``perturbations``, one per sample; none at all leaves nothing out.

    Copies to ``device`` once, and only where samples differ, so build it before a region that is captured.

    Raises:
        ValueError: a block number is not one of ``num_layers`` blocks.
    """
    if not perturbations:
        return PerturbationPlan((BlockKeep(),) * num_layers, None)
    for perturbation in perturbations:
        _check_blocks(perturbation, num_layers)
    # In the order of BlockKeep's fields.
    skipped = [
        [[_skips(getattr(sample, field.name), block) for sample in perturbations] for field in fields(Perturbation)]
        for block in range(num_layers)
    ]
    masks: Tensor | None = None
    if any(any(samples) and not all(samples) for block in skipped for samples in block):
        masks = ~torch.tensor(skipped)[..., None, None].to(device)

    def keep(block: int, kind: int) -> Keep:
        samples = skipped[block][kind]
        if masks is None or all(samples) or not any(samples):
            return not samples[0]
        return masks[block, kind]

    blocks = (BlockKeep(*(keep(block, kind) for kind in range(len(skipped[block])))) for block in range(num_layers))
    return PerturbationPlan(tuple(blocks), len(perturbations))


def _skips(blocks: Blocks, block: int) -> bool:
    return blocks == "all" or block in blocks


def _check_blocks(perturbation: Perturbation, num_layers: int) -> None:
    for field in fields(Perturbation):
        blocks: Blocks = getattr(perturbation, field.name)
        unknown = [] if blocks == "all" else [block for block in blocks if not 0 <= block < num_layers]
        if unknown:
            raise ValueError(
                f"{field.name} names block {unknown[0]} and the transformer has {num_layers} blocks; "
                f"choose from 0 to {num_layers - 1}"
            )
