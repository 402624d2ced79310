"""Layer norm of Wan: in fp32, whatever the dtype of the tokens and of the weights."""

import torch.nn.functional as F
from torch import Tensor, nn


class Float32LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., D]. Returns fp32."""
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)
