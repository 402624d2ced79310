"""Prompts to what Wan's transformer attends to: UMT5's states, zeros after a prompt's end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vgen.models.wan.text import Tokenizer, encode_text
from vgen.stages.text import tell

EncodePrompts = Callable[[Sequence[str]], list[Tensor]]
"""Prompts to their contexts ``[1, L, D]``, in order."""


@dataclass(frozen=True)
class TextComponents:
    tokenizer: Tokenizer
    text_encoder: nn.Module
    max_length: int
    told: set[str] = field(default_factory=set)
    """Prompts that were checked, so that each is told of once."""


@torch.no_grad()
def encode_prompts(components: TextComponents, prompts: Sequence[str], device: torch.device) -> list[Tensor]:
    """Encode prompts one at a time, so that a prompt's context does not depend on its neighbours."""
    contexts = []
    for prompt in prompts:
        tokens = components.tokenizer.tokenize([prompt], components.max_length)
        if prompt not in components.told:
            components.told.add(prompt)
            tell(components.tokenizer, prompt, tokens.dropped[0], components.max_length)
        ids, mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)
        contexts.append(encode_text(components.text_encoder, ids, mask))
    return contexts
