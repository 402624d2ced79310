"""What does not fit Wan is refused in one sentence, before anything is loaded."""

from pathlib import Path

import pytest
from omegaconf.errors import InterpolationKeyError
from PIL import Image

from tests.test_config import check
from vgen import app
from vgen.typed import ConfigurationError


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.new("RGB", (64, 64), "red").save(path)
    return path


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "model=wan request.height=720",
            r"request\.height=720 is not a multiple of 32 \(16 pixels a latent, 2 latents a token\); use 704 or 736",
        ),
        ("model=wan21_t2v_1_3b request.width=840", r"is not a multiple of 16 \(8 pixels a latent, .*; use 832 or 848"),
        ("model=wan request.num_frames=120", r"request\.num_frames=120 is not 4k \+ 1; use 117 or 121"),
        ("model=wan request.height=32800", "more than the transformer's 1024 positions; use 32768 or less"),
        ("model=wan request.num_frames=4097", "more than the transformer's 1024 positions; use 4093 or less"),
        ("model=wan request.audio=generate", "request.audio=generate, but Wan has no sound; use request.audio=none"),
        ("model=wan sampler.shift=0", "sampler.shift=0.0 moves no schedule"),
        ("model=wan sampler.guidance_scale=-1", "sampler.guidance_scale=-1.0 is not a scale; give 1"),
        ("model=wan sampler.guidance_scale_2=3", "for a second expert, and model=wan has one transformer; use null"),
        ("model=wan22_a14b_t2v sampler.guidance_scale_2=null", "there are two experts; give the scale at low noise"),
        ("model=wan22_a14b_t2v model.boundary=null", "which has two experts; give 0.875"),
        (
            "model=wan model.boundary=0.9",
            "model.boundary=0.9 does not fit model=wan, which has one transformer; use null",
        ),
        ("model=wan22_a14b_t2v model.boundary=1.0", "leaves one expert unused"),
        ("model=wan model.offload=expert", "for two transformers, and model=wan has one; use stages or none"),
        ("model=ltx2 model.offload=expert", "LTX-2 has one; use stages or none"),
        ("model=wan model.kind=t2v", "model=wan is Wan 2.2 ti2v and model=wan has the defaults of 2.2 t2v"),
        ("model=wan model.vae.chunk=0", "model.vae.chunk=0 latent frames is none"),
        ("model=wan model.vae.backend=diffusers model.vae.chunk=2", "goes frame by frame; use 1"),
        ("model=ltx2 model.vae.backend=diffusers", "are Wan's; leave them out with LTX-2"),
        ("model=wan model.vae.tile_size=100", "multiple of 16"),
        ("model=wan +model.vae.tile_frames=8", "would cut along time"),
        ("model=wan model.text_encoder.max_length=1", "no room for a word and its end; use 512"),
        ("model=wan22_a14b_i2v", "makes a video of an image; give one in request.image"),
        ("model=wan sampler.steps=0", "denoises nothing"),
    ],
)
def test_one_sentence(overrides: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check(*overrides.split())


def test_a_sampler_of_the_other_family() -> None:
    for overrides, name in ((("model=wan", "sampler=default"), "sigmas"), (("model=ltx2", "sampler=euler"), "shift")):
        with pytest.raises(InterpolationKeyError) as caught:
            check(*overrides)
        assert f"has no sampler_defaults.{name}; leave sampler= out" in app.explain(caught.value)


def test_images_by_variant(picture: Path) -> None:
    first, late = f"{{path: {picture}}}", f"{{path: {picture}, frame: 80}}"
    check("model=wan", f"request.image={picture}")
    check("model=wan22_a14b_i2v", f"request.images=[{first},{late}]")
    check("model=wan21_i2v_14b_480p", f"request.image={picture}")
    for overrides, sentence in (
        (("model=wan", f"request.images=[{late}]"), "takes the first frame of several; give one image at frame 0"),
        (("model=wan", f"request.image={picture}", "request.num_frames=1"), "the first frame of several"),
        (("model=wan22_a14b_t2v", f"request.image={picture}"), "makes a video of text alone"),
        (("model=wan21_i2v_14b_480p", f"request.images=[{first},{late}]"), r"reads the images at \[0\]; give those"),
        (("model=wan", f"request.images=[{{path: {picture}, strength: 0.5}}]"), "Wan keeps an image fully; use 1"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            check(*overrides)
