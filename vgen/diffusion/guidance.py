"""Guidance on clean samples: away from other predictions of the same step, with a rescale of the standard deviation.

Source: Lightricks/LTX-2 at 400fd31 (``components/guiders.py``); classifier-free guidance: Ho and Salimans, arXiv
2207.12598; spatio-temporal guidance: Hyung et al., arXiv 2411.18664; the rescale: section 3.4 of Lin et al., arXiv
2305.08891.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

UNCOND, PTB, MOD = "uncond", "ptb", "mod"
"""Names of the passes that a guidance moves away from: other text, perturbed self-attention, isolated modality."""


@dataclass(frozen=True)
class Guidance:
    """Scales of one modality; the defaults are all off.

    ``stg_blocks``: transformer blocks that its perturbed pass leaves out. ``skip_step``: steps between two that compute
    it.
    """

    cfg_scale: float = 1.0
    stg_scale: float = 0.0
    modality_scale: float = 1.0
    rescale_scale: float = 0.0
    skip_step: int = 0
    stg_blocks: tuple[int, ...] = ()

    def weights(self) -> dict[str, float]:
        """How much each pass pushes; a pass that does not is left out."""
        weights = {UNCOND: self.cfg_scale - 1, PTB: self.stg_scale, MOD: self.modality_scale - 1}
        return {name: weight for name, weight in weights.items() if weight != 0}

    def skips(self, step: int) -> bool:
        """Whether this modality keeps its last clean sample at ``step`` (from 0)."""
        return step % (self.skip_step + 1) != 0


def apply_guidance(cond: Tensor, others: Mapping[str, Tensor], guidance: Guidance) -> Tensor:
    """``cond + sum of weight * (cond - other)``, rescaled, in float32.

    Args:
        cond: ``[B, T, C]`` clean sample of the conditional pass.
        others: by name of pass, ``[B, T, C]`` each; those without a weight are not read.

    Returns:
        ``[B, T, C]`` in ``cond``'s dtype. The rescale takes the standard deviation over the whole tensor.
    """
    weights = guidance.weights()
    if not weights:
        return cond
    cond_fp32 = cond.float()
    pred = cond_fp32
    for name, weight in weights.items():
        pred = pred + weight * (cond_fp32 - others[name].float())
    if guidance.rescale_scale != 0:
        factor = guidance.rescale_scale * (cond_fp32.std() / pred.std()) + (1 - guidance.rescale_scale)
        pred = pred * factor
    return pred.to(cond.dtype)
