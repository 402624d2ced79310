"""Whole runs of Wan against the pipelines of diffusers, with the same weights, texts, images and noise, in fp32.

The transformers are those of diffusers, ``model.residual=model``; the official numbers differ by the timestep's
sinusoid, in fp64 there (``test_wan_transformer``), and by the sigmas (``test_wan_schedule``).
"""

import dataclasses
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from tests import tiny_wan
from tests.pipelines.test_ltx2_pipeline import ListSink, make_job
from vgen import residency, transforms
from vgen.components import wan as built
from vgen.families import family_of
from vgen.job import Job
from vgen.models.wan.image_encoder import encode_images, prepare_images
from vgen.pipelines import wan
from vgen.pipelines.wan import WanComponents, latent_geometry, make_noise
from vgen.requests import Request
from vgen.stages import wan_denoise
from vgen.stages.checks import NumericsError

CPU = torch.device("cpu")
HEIGHT, WIDTH, FRAMES, STEPS = 64, 96, 9, 3
LARGEST_ERROR = 2e-5
"""Over the largest value: three steps amplify what one forward differs by (2e-6)."""

MODELS = {
    "t2v_2_1": "wan21_t2v_1_3b",
    "t2v_a14b": "wan22_a14b_t2v",
    "ti2v": "wan",
    "i2v_a14b": "wan22_a14b_i2v",
    "i2v_2_1": "wan21_i2v_14b_480p",
}
EXPERTS = {"t2v_a14b", "i2v_a14b"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {variant: tiny_wan.save_diffusers(tmp_path_factory.mktemp(variant), variant) for variant in MODELS}


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the request's size, so that nobody scales it."""
    path = tmp_path_factory.mktemp("picture") / "a.png"
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)).save(path)
    return path


def wan_job(tmp_path: Path, folder: Path, variant: str, *overrides: str) -> Job:
    # Not the 512 tokens of the published models, nearly all of them zeros here.
    sizes = [f"request.height={HEIGHT}", f"request.width={WIDTH}", f"request.num_frames={FRAMES}"]
    scales = ["sampler.guidance_scale=4.0", *(["sampler.guidance_scale_2=3.0"] if variant in EXPERTS else [])]
    return make_job(
        tmp_path,
        f"model={MODELS[variant]}",
        f"model.checkpoint={folder}",
        "model.residual=model",
        "model.text_encoder.max_length=24",
        f"sampler.steps={STEPS}",
        "sampler.schedule=diffusers",
        "sampler.shift=3.0",
        "request.prompt=a red circle",
        "request.negative_prompt=blue",
        *sizes,
        *scales,
        *overrides,
    )


def generate(job: Job, request: Request | None = None) -> tuple[WanComponents, ListSink]:
    components, sink = transforms.build_components(job, CPU), ListSink()
    wan.generate(components, request or job.requests[0], job.config.sampler, sink)  # type: ignore[arg-type]
    return components, sink


def theirs(cls: Any, variant: str, job: Job, components: WanComponents, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Latents and frames of diffusers' pipeline."""
    modules = tiny_wan.build(variant)
    sizes = tiny_wan.VARIANTS[variant]
    pipeline = cls(
        tokenizer=None,
        text_encoder=None,
        vae=modules["vae"].eval(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=modules["transformer"].eval(),
        transformer_2=modules["transformer_2"].eval() if "transformer_2" in modules else None,
        boundary_ratio=sizes.boundary,
        expand_timesteps=sizes.expand_timesteps,
        **({"image_processor": None, "image_encoder": None} if cls is WanImageToVideoPipeline else {}),
    )
    pipeline.set_progress_bar_config(disable=True)
    if (embeds := inputs.pop("image_embeds", None)) is not None:
        pipeline.encode_image = lambda *_: embeds  # which it takes instead of an image only, not beside it
    request = job.requests[0]
    positive, negative = components.encode_prompts([request.prompt, request.negative_prompt])
    noise = make_noise(latent_geometry(request, job.architecture), job.architecture, seed=request.seed, device=CPU)
    results = []
    for output_type in ("latent", "pt"):
        made = pipeline(
            prompt_embeds=positive, negative_prompt_embeds=negative, height=HEIGHT, width=WIDTH, num_frames=FRAMES,
            num_inference_steps=STEPS, guidance_scale=4.0, latents=noise.clone(), output_type=output_type,
            guidance_scale_2=3.0 if variant in EXPERTS else None, return_dict=False, **inputs,
        )[0]  # fmt: skip
        results.append(made)
    return results[0], results[1].transpose(1, 2) * 2 - 1


def relative(ours: Tensor, other: Tensor) -> float:
    return float((ours.double() - other.double()).abs().max() / other.double().abs().max())


@pytest.mark.parametrize("variant", ["t2v_2_1", "t2v_a14b", "ti2v"])
def test_text_to_video_is_that_of_diffusers(variant: str, folders: dict[str, Path], tmp_path: Path) -> None:
    job = wan_job(tmp_path, folders[variant], variant)
    components, sink = generate(job)
    latents, frames = theirs(WanPipeline, variant, job, components)
    assert relative(sink.video, latents) <= LARGEST_ERROR
    assert relative(sink.frames.clamp(-1, 1), frames) <= LARGEST_ERROR
    assert sink.frames.shape == (1, 3, FRAMES, HEIGHT, WIDTH)


@pytest.mark.parametrize("variant", ["ti2v", "i2v_a14b", "i2v_2_1"])
def test_image_to_video_is_that_of_diffusers(
    variant: str, folders: dict[str, Path], picture: Path, tmp_path: Path
) -> None:
    # With an image in the attention, diffusers takes the last 512 tokens for the text, whatever its length.
    length = f"model.text_encoder.max_length={512 if variant == 'i2v_2_1' else 24}"
    job = wan_job(tmp_path, folders[variant], variant, f"request.image={picture}", length)
    components, sink = generate(job)
    inputs: dict[str, Any] = {"image": Image.open(picture)}
    if variant == "i2v_2_1":
        # diffusers crops what CLIP sees; what we give it is the official code's and tested there.
        module = tiny_wan.build(variant)["image_encoder"].eval()
        pixels = torch.from_numpy(np.array(inputs["image"])).permute(2, 0, 1)[None].float() / 127.5 - 1
        with torch.no_grad():
            inputs["image_embeds"] = encode_images(module, prepare_images(pixels, tiny_wan.CLIP["image_size"]))
    latents, frames = theirs(WanImageToVideoPipeline, variant, job, components, **inputs)
    assert relative(sink.video, latents) <= LARGEST_ERROR
    assert relative(sink.frames.clamp(-1, 1), frames) <= LARGEST_ERROR


def test_both_layouts_make_the_same_bits(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in ("ti2v", "t2v_a14b"):
        original = tiny_wan.save_original(tmp_path / variant, variant)
        _, one = generate(wan_job(tmp_path, folders[variant], variant))
        with monkeypatch.context() as patched:
            tiny_wan.tiny_constants(patched)
            _, two = generate(wan_job(tmp_path, original, variant, "model.allow_pickle=true"))
        assert torch.equal(one.video, two.video)
        assert torch.equal(one.frames, two.frames)


def test_the_experts_meet_their_own_guidance(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 999, 857 and 601 the first alone is at or above the boundary; scales in the order high noise, low noise."""
    job = wan_job(tmp_path, folders["t2v_a14b"], "t2v_a14b")
    seen = []
    built = transforms.build_components(job, CPU)

    def make_step(expert: Any, conditioning: Any) -> Any:
        step = wan_denoise.build_serial_step(built.experts[expert], conditioning)

        def noted(latents: Tensor, history: Any, plan: Any, numbers: Any) -> Any:
            seen.append((expert == "high_noise", int(numbers.timestep), plan.guidance))
            return step(latents, history, plan, numbers)

        return noted

    components = dataclasses.replace(built, make_step=make_step)
    wan.generate(components, job.requests[0], job.config.sampler, ListSink())  # type: ignore[arg-type]
    assert seen == [(True, 999, 4.0), (False, 857, 3.0), (False, 600, 3.0)]


def test_the_result_does_not_depend_on_the_chunk(folders: dict[str, Path], tmp_path: Path) -> None:
    frames = []
    for chunk in ("1", "2", "null"):
        job = wan_job(tmp_path, folders["ti2v"], "ti2v", f"model.vae.chunk={chunk}", "sampler.steps=1")
        frames.append(generate(job)[1].frames)
    assert relative(frames[1], frames[0]) <= 1e-6
    assert relative(frames[2], frames[0]) <= 1e-6


def test_one_frame_is_an_image(folders: dict[str, Path], tmp_path: Path) -> None:
    job = wan_job(tmp_path, folders["t2v_2_1"], "t2v_2_1", "request.num_frames=1")
    assert generate(job)[1].frames.shape == (1, 3, 1, HEIGHT, WIDTH)


def test_without_guidance_the_negative_prompt_is_not_read(folders: dict[str, Path], tmp_path: Path) -> None:
    job = wan_job(tmp_path, folders["t2v_2_1"], "t2v_2_1", "sampler.guidance_scale=1.0")
    components = transforms.build_components(job, CPU)
    read: list[str] = []

    def encode(prompts: Any) -> list[Tensor]:
        read.extend(prompts)
        return components.encode_prompts(prompts)  # type: ignore[no-any-return]

    wan.generate(
        dataclasses.replace(components, encode_prompts=encode),
        job.requests[0],
        job.config.sampler,
        ListSink(),  # type: ignore[arg-type]
    )
    assert read == ["a red circle"]
    assert family_of(job.config).pass_names(job.requests[0], job.config) == ("cond",)


def test_the_diffusers_vae_in_place_of_ours(folders: dict[str, Path], picture: Path, tmp_path: Path) -> None:
    overrides = (f"request.image={picture}", "sampler.steps=1")
    _, ours = generate(wan_job(tmp_path, folders["ti2v"], "ti2v", *overrides))
    _, others = generate(wan_job(tmp_path, folders["ti2v"], "ti2v", *overrides, "model.vae.backend=diffusers"))
    assert relative(others.video, ours.video) <= LARGEST_ERROR
    assert relative(others.frames, ours.frames.clamp(-1, 1)) <= LARGEST_ERROR  # diffusers clamps


def test_broken_numbers_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    job = wan_job(tmp_path, folders["t2v_2_1"], "t2v_2_1")
    components = transforms.build_components(job, CPU)
    components.experts["high_noise"].proj_out.bias[0] = float("nan")
    with pytest.raises(NumericsError, match="the video latents are NaN or infinite after step 1"):
        wan.generate(components, job.requests[0], job.config.sampler, ListSink())  # type: ignore[arg-type]


@pytest.fixture
def travelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights travel on the CPU as well, and what is away is NaN."""

    def vanish(visitor: Any) -> None:
        for tensor, _, on_host in visitor.places:
            tensor.data = torch.full_like(on_host, float("nan") if on_host.is_floating_point() else 0)

    monkeypatch.setattr(residency._Visitor, "move_home", vanish)
    monkeypatch.setattr(built, "Residency", partial(residency.Residency, active=True))


@pytest.mark.usefixtures("travelling")
@pytest.mark.parametrize(
    ("variant", "offload"), [("i2v_2_1", "stages"), ("i2v_a14b", "expert"), ("ti2v", "text_encoder")]
)
def test_offload_changes_no_bit(
    variant: str, offload: str, folders: dict[str, Path], picture: Path, tmp_path: Path
) -> None:
    overrides = (f"request.image={picture}", "sampler.steps=2", "request.num_frames=5")
    _, usual = generate(wan_job(tmp_path, folders[variant], variant, *overrides))
    _, other = generate(wan_job(tmp_path, folders[variant], variant, *overrides, f"model.offload={offload}"))
    assert torch.equal(usual.video, other.video)
    assert torch.equal(usual.frames, other.frames)


@pytest.mark.usefixtures("travelling")
@pytest.mark.parametrize(
    "forgotten", ["text_encoder", "image_encoder", "transformer", "video_encoder", "video_decoder"]
)
def test_a_stage_that_forgets_its_weights_is_found_out(
    forgotten: str, folders: dict[str, Path], picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without the visit of any one component there is NaN somewhere."""
    use = residency.Residency.use

    def use_all_but_one(self: residency.Residency, *names: str) -> AbstractContextManager[None]:
        return use(self, *(name for name in names if name != forgotten))

    monkeypatch.setattr(residency.Residency, "use", use_all_but_one)
    overrides = (f"request.image={picture}", "sampler.steps=2", "request.num_frames=5", "model.offload=stages")
    job = wan_job(tmp_path, folders["i2v_2_1"], "i2v_2_1", *overrides)
    try:
        _, sink = generate(job)
    except NumericsError:
        return
    assert sink.frames.isnan().any()
