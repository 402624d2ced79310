"""Classifier-free guidance on clean samples, with the rescale of its standard deviation.

Source: Lightricks/LTX-2 at 400fd31 (``components/guiders.py``); Ho and Salimans, arXiv 2207.12598; the rescale is
section 3.4 of Lin et al., arXiv 2305.08891.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Guidance:
    """Scales of one modality: ``cfg_scale`` 1 and ``rescale_scale`` 0 are off."""

    cfg_scale: float = 1.0
    rescale_scale: float = 0.0


def needs_uncond(*guidances: Guidance) -> bool:
    """Whether any modality asks for the unconditional pass; one pass serves all of them."""
    return any(guidance.cfg_scale != 1 for guidance in guidances)


def apply_guidance(cond: Tensor, uncond: Tensor | None, guidance: Guidance) -> Tensor:
    """Combine the clean samples of two passes in float32.

    Args:
        cond, uncond: ``[B, T, C]``; ``uncond`` is not read where ``cfg_scale`` is 1.

    Returns:
        ``[B, T, C]`` in ``cond``'s dtype. The rescale takes the standard deviation over the whole tensor.
    """
    if guidance.cfg_scale == 1:
        return cond
    assert uncond is not None
    cond_fp32 = cond.float()
    pred = cond_fp32 + (guidance.cfg_scale - 1) * (cond_fp32 - uncond.float())
    if guidance.rescale_scale != 0:
        factor = guidance.rescale_scale * (cond_fp32.std() / pred.std()) + (1 - guidance.rescale_scale)
        pred = pred * factor
    return pred.to(cond.dtype)
