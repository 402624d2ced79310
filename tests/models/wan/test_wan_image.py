"""Wan's image encoder: its input against the formula, its states against diffusers, its tensors in both layouts."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from vgen.models.wan.encoder_configs import CLIP_VIT_H14
from vgen.models.wan.image_encoder import (
    ImageEncoderError,
    build_image_encoder,
    encode_images,
    from_original,
    prepare_images,
    restore_buffers,
)

SIZE = 56


def tiny_clip() -> dict[str, Any]:
    return dict(CLIP_VIT_H14) | {
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": SIZE,
    }


@cache
def reference() -> Any:
    """transformers' model with random weights, norms and biases among them."""
    model: Any = CLIPVisionModel(CLIPVisionConfig(**tiny_clip())).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        gain = parameter.ndim == 1 and name.endswith("weight")
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + gain
    return model


def loaded(dtype: torch.dtype = torch.float32) -> Any:
    model = build_image_encoder(tiny_clip())
    model.load_state_dict(reference().to(dtype).state_dict(), assign=True)
    return model


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def pixels(array: np.ndarray) -> Tensor:
    """[1, 3, h, w] in [-1, 1]."""
    return torch.from_numpy(array).permute(2, 0, 1)[None] / 127.5 - 1


def processor() -> Any:
    return CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_those_of_diffusers(dtype: torch.dtype) -> None:
    """On a picture that neither side has to fit."""
    array = picture(SIZE, SIZE)
    pipeline = WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=None,
        image_processor=processor(),
        image_encoder=reference().float(),
    )
    with torch.no_grad():
        theirs = pipeline.encode_image(Image.fromarray(array), device=torch.device("cpu"))
        ours = encode_images(loaded(dtype), prepare_images(pixels(array), SIZE))
    assert ours.shape == theirs.shape == (1, 17, 32)
    assert ours.dtype == dtype
    error = (ours.float() - theirs).abs().max() / theirs.abs().max()
    assert error < {torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]


def test_a_picture_of_the_encoder_s_size_is_only_scaled() -> None:
    array = picture(SIZE, SIZE)
    theirs = processor()(images=Image.fromarray(array), return_tensors="pt").pixel_values
    ours = prepare_images(pixels(array), SIZE)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


def cubic(distance: np.ndarray) -> np.ndarray:
    """The cubic convolution kernel with a = -0.75."""
    x, a = np.abs(distance), -0.75
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def weights(size: int) -> np.ndarray:
    """Of each of ``size`` samples in each of ``SIZE``: four neighbours of its centre, the border repeated."""
    matrix = np.zeros((SIZE, size))
    for row, centre in enumerate((np.arange(SIZE) + 0.5) * size / SIZE - 0.5):
        for sample in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            matrix[row, min(max(sample, 0), size - 1)] += cubic(np.array(centre - sample))
    return matrix


@pytest.mark.parametrize(("height", "width"), [(91, 160), (150, 64), (40, 30)])
def test_other_pictures_are_squashed_without_antialiasing(height: int, width: int) -> None:
    images = pixels(picture(height, width))
    square = weights(height) @ images[0].double().numpy() @ weights(width).T * 0.5 + 0.5
    mean, std = (np.array(values)[:, None, None] for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    expected = torch.from_numpy((square - mean) / std)[None].float()
    torch.testing.assert_close(prepare_images(images, SIZE), expected, atol=1e-4, rtol=0)


def test_the_order_of_several_pictures_is_kept() -> None:
    first, last = pixels(picture(40, 30)), pixels(picture(30, 40)[:, ::-1].copy())
    both = torch.cat([prepare_images(images, SIZE) for images in (first, last)])
    with torch.no_grad():
        states = encode_images(loaded(), both)
        alone = encode_images(loaded(), both[1:])
    assert states.shape == (2, 17, 32)
    torch.testing.assert_close(states[1:], alone, atol=1e-5, rtol=1e-5)


def original(model: Any) -> dict[str, Tensor]:
    """Wan-Video/Wan2.1 at 9737cba, ``wan/modules/clip.py``: the weights in its names and shapes, and a text model's."""
    theirs = model.state_dict()
    names = {"pre_layrnorm": "pre_norm", "post_layernorm": "post_norm", "embeddings.patch_embedding": "patch_embedding"}
    tensors = {
        "visual.cls_embedding": theirs["embeddings.class_embedding"][None, None],
        "visual.pos_embedding": theirs["embeddings.position_embedding.weight"][None],
        "visual.head": torch.zeros(32, 12),
        "log_scale": torch.zeros([]),
        "textual.token_embedding.weight": torch.zeros(20, 8),
    }
    for ours, name in names.items():
        for kind in ("weight", "bias") if "norm" in ours else ("weight",):
            tensors[f"visual.{name}.{kind}"] = theirs[f"{ours}.{kind}"]
    for layer in range(3):
        ours, name = f"encoder.layers.{layer}", f"visual.transformer.{layer}"
        for kind in ("weight", "bias"):
            for old, new in (("norm1", "layer_norm1"), ("norm2", "layer_norm2"), ("attn.proj", "self_attn.out_proj")):
                tensors[f"{name}.{old}.{kind}"] = theirs[f"{ours}.{new}.{kind}"]
            for index, part in ((0, "fc1"), (2, "fc2")):
                tensors[f"{name}.mlp.{index}.{kind}"] = theirs[f"{ours}.mlp.{part}.{kind}"]
            fused = [theirs[f"{ours}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            tensors[f"{name}.attn.to_qkv.{kind}"] = torch.cat(fused)
    return tensors


def test_the_original_file_gives_the_same_tensors() -> None:
    expected, ours = reference().float().state_dict(), from_original(original(reference().float()))
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert tensor.equal(expected[name]), name


def test_a_tensor_of_another_model_is_refused() -> None:
    with pytest.raises(ImageEncoderError, match=r"the image encoder holds 'blocks\.0\.modulation'; use models_clip"):
        from_original({"blocks.0.modulation": torch.zeros(1)})


def test_the_positions_are_made_on_the_device() -> None:
    expected = CLIPVisionModel(CLIPVisionConfig(**tiny_clip()))
    model: Any = build_image_encoder(tiny_clip())
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers, theirs = dict(model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == theirs.keys()
    assert all(buffer.equal(theirs[name]) and buffer.dtype == theirs[name].dtype for name, buffer in buffers.items())
    assert not set(buffers) & set(model.state_dict())
    restore_buffers(model, "meta")
    assert all(buffer.is_meta for buffer in model.buffers())
    restore_buffers(model, "cpu")
    assert all(buffer.equal(theirs[name]) for name, buffer in model.named_buffers())


def test_the_full_size_is_vit_h_14() -> None:
    model: Any = build_image_encoder(CLIP_VIT_H14)
    assert sum(parameter.numel() for parameter in model.parameters()) == 630_766_080
    assert model.config.hidden_act == "gelu"  # transformers' default is OpenAI's approximation
    assert model.embeddings.num_positions == 257
    assert not model.training


def test_another_kind_of_image_encoder_is_refused() -> None:
    for config in ({"model_type": "siglip_vision_model"}, {}):
        with pytest.raises(ImageEncoderError, match=r"model_type=.*; Wan 2\.1 needs clip_vision_model"):
            build_image_encoder(config)
