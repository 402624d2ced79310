"""CLIP ViT-H/14 as the image encoder of Wan 2.1 image-to-video: the vision model of ``transformers`` and its input.

Shapes: B images, h, w their size, R the encoder's (224), L tokens (257), D hidden size (1280).
Source: Wan-Video/Wan2.1 at 9737cba, ``wan/modules/clip.py``; the modules are those of huggingface/transformers (5.17
and 5.24 tested).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgen.models.names import owners, rename
from vgen.models.wan.keys import ORIGINAL, ORIGINAL_IGNORED, unfuse

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)

_LEADING_DIMS = {"visual.cls_embedding": 2, "visual.pos_embedding": 1}
"""Dims of 1 that tensors of an original file start with."""


class ImageEncoderError(ValueError):
    """An image encoder's config or tensors are not those that Wan needs."""


def build_image_encoder(config: Mapping[str, Any]) -> nn.Module:
    """``CLIPVisionModel`` of a ``config.json``: parameters on the meta device, the one buffer on the CPU.

    Raises:
        ImageEncoderError: the config is of another model type.
    """
    from transformers.models.clip import CLIPVisionConfig, CLIPVisionModel

    kind = config.get("model_type")
    if kind != "clip_vision_model":
        raise ImageEncoderError(
            f"the image encoder's config.json has model_type={kind!r}; Wan 2.1 needs clip_vision_model: use the "
            f"image_encoder of Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
        )
    with torch.device("meta"):
        model: nn.Module = CLIPVisionModel(CLIPVisionConfig(**config))
    restore_buffers(model, "cpu")
    return model.eval()


def restore_buffers(model: Any, device: torch.device | str) -> None:
    """Make the buffer that no checkpoint has, the numbers of the positions, in place."""
    embeddings = model.embeddings
    embeddings.position_ids = torch.arange(embeddings.num_positions, device=device)[None]


def prepare_images(images: Tensor, size: int) -> Tensor:
    """Images [B, 3, h, w] in [-1, 1] as the encoder takes them, float32 [B, 3, R, R] for ``size`` R.

    Squashed to a square whatever their shape, without antialiasing, as the official code does. The image processor of
    diffusers crops the middle instead, and sees nothing of what lies beside it.
    """
    square = F.interpolate(images.float(), size=(size, size), mode="bicubic", align_corners=False)
    mean, std = (square.new_tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return (square * 0.5 + 0.5 - mean) / std


def encode_images(model: nn.Module, images: Tensor) -> Tensor:
    """States [B, L, D] before the last layer, class token first, in the model's dtype, of images [B, 3, R, R]."""
    states: Tensor = model(pixel_values=images, output_hidden_states=True).hidden_states[-2]
    return states


def from_original(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an original CLIP file under ``CLIPVisionModel``'s names and in its shapes, as views.

    The file also holds a text model, which is left out; query, key and value are one tensor there, and the class token
    and the positions have leading dims of 1.

    Raises:
        ImageEncoderError: a tensor that the file should not hold.
    """
    layouts = {"image_encoder": ORIGINAL["image_encoder"]}
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(ORIGINAL_IGNORED["image_encoder"]):
            continue
        prefix = owners(name, layouts).get("image_encoder")
        if prefix is None:
            raise ImageEncoderError(
                f"the image encoder holds '{name}'; use models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth of "
                f"Wan-AI/Wan2.1-I2V-14B-480P"
            )
        names = unfuse(rename(name, layouts["image_encoder"], prefix))
        flat = tensor.flatten(0, _LEADING_DIMS.get(name, 0))
        ours |= zip(names, flat.chunk(len(names)), strict=True)
    return ours
