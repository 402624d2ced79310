"""Predicted memory against what a GPU measured and what the modules allocate, and what is said when it is short."""

import dataclasses
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.architectures import architecture
from vgen import ltx2_memory, memory
from vgen.ltx2_memory import GUIDANCE_TENSORS, TextSizes, denoise_bytes, estimate, rope_bytes
from vgen.memory import GIB, Activations, choose_decode, describe, fit, predict
from vgen.models.ltx2.audio_encoder import AudioEncoder
from vgen.models.ltx2.audio_vae import AudioDecoder
from vgen.models.ltx2.bandwidth import BandwidthExtendedVocoder
from vgen.models.ltx2.config import (
    AudioDecoderConfig,
    AudioEncoderConfig,
    BandwidthExtensionConfig,
    DecoderBlock,
    EncoderBlock,
    VideoDecoderConfig,
    VideoEncoderConfig,
    VocoderConfig,
)
from vgen.models.ltx2.connectors import normalise_states
from vgen.models.ltx2.geometry import Geometry
from vgen.models.ltx2.transformer import LTX2Transformer, Stream
from vgen.models.ltx2.video_encoder import VideoEncoder
from vgen.models.ltx2.video_vae import VideoDecoder
from vgen.models.ltx2.vocoder import Vocoder
from vgen.parallel.tiles import TileSettings, decode_tiled, plan_tiles
from vgen.typed import ConfigurationError

LTX_2_0 = architecture("ltx2")
TRANSFORMER_2_0, VOCODER_2_0 = LTX_2_0.transformer, LTX_2_0.vocoder
ENCODER_2_0, DECODER_2_0 = LTX_2_0.video_encoder, LTX_2_0.video_decoder
FULL = Geometry(latent_frames=16, latent_height=24, latent_width=40, fps=24.0, audio_tokens=126)
GEMMA = TextSizes(tokens=1024, hidden_size=3840, intermediate_size=15360, num_states=49)
TILES = plan_tiles(16, 24, 40, TileSettings())
WEIGHTS_2_0 = {
    "text_encoder": 23532_074_000,
    "connectors": 2_862_945_000,
    "transformer": 37_752_349_000,
    "video_decoder": 1_056_762_000,
    "audio_decoder": 63_831_000,
    "vocoder": 111_186_000,
}
ESTIMATE_2_0 = estimate(LTX_2_0, FULL, GEMMA, TILES, value_bytes=2, contexts=2)
"""bf16 at 768x1280x121, the sizes that BENCHMARKS.md measured on an H200."""


def test_a_step_alone_as_measured() -> None:
    # 36.7 GiB with the transformer alone, text projected anew at each step: no keys and values kept.
    uncached = dataclasses.replace(TRANSFORMER_2_0, caption_projection=False)
    work = denoise_bytes(uncached, FULL, 1024, 1, 2) + rope_bytes(uncached, FULL, 2)
    assert (WEIGHTS_2_0["transformer"] + work) / GIB == pytest.approx(36.7, rel=0.01)


def test_decodes_as_measured() -> None:
    weights = WEIGHTS_2_0["video_decoder"]
    assert (weights + ESTIMATE_2_0.decode_video_whole) / GIB == pytest.approx(6.4, rel=0.02)
    assert (weights + ESTIMATE_2_0.decode_video_tile) / GIB == pytest.approx(2.2, rel=0.1)


def test_whole_runs_as_measured() -> None:
    whole, tile = (predict(WEIGHTS_2_0, ESTIMATE_2_0, "none", decode) for decode in ("whole", "tile"))
    assert whole.peak / GIB == pytest.approx(66.6, rel=0.01) and whole.peak_stage == "decode_video"
    # Measured before the text's keys and values were kept; without them the text encoder was the peak.
    assert tile.stages["text_encode"] / GIB == pytest.approx(62.9, rel=0.01)


class Peak(TorchDispatchMode):
    """Counts the bytes of storages that operators make and nobody has dropped; operators' own scratch is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in inputs | self._known:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def peak_of(call: Callable[[], object]) -> int:
    with torch.no_grad(), Peak() as peak:
        call()
    return peak.peak


def randomized(module: nn.Module) -> nn.Module:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.normal_(std=0.1)
    return module.requires_grad_(False).eval()


RES = DecoderBlock("res_x", num_layers=1)
UP = DecoderBlock("compress_all", multiplier=2, residual=True)
SMALL_DECODERS = {
    "2.0": VideoDecoderConfig(8, 3, 8, 4, (RES, UP, RES, UP, RES, UP, RES), "reflect", False),
    "wide middle": VideoDecoderConfig(
        8,
        3,
        4,
        4,
        (RES, DecoderBlock("compress_all", multiplier=1), DecoderBlock("res_x", 2), UP, RES, UP),
        "zeros",
        False,
    ),
}


@pytest.mark.parametrize("config", SMALL_DECODERS.values(), ids=SMALL_DECODERS)
@pytest.mark.parametrize("latents", [(3, 4, 6), (5, 3, 2)])
def test_whole_decode_is_what_the_decoder_allocates(config: VideoDecoderConfig, latents: tuple[int, ...]) -> None:
    decoder, x = randomized(VideoDecoder(config)), torch.randn(1, config.latent_channels, *latents)
    predicted = ltx2_memory.decode_bytes(config, latents, value_bytes=4) - memory.CONVOLUTION_WORKSPACE
    assert peak_of(lambda: decoder(x)) == predicted


SMALL_ENCODERS = {
    "2.0": tuple(dataclasses.replace(block, num_layers=1) for block in ENCODER_2_0.blocks),
    "wide start": (
        EncoderBlock("compress_space_res", multiplier=4),
        EncoderBlock("compress_time_res", multiplier=2),
        EncoderBlock("compress_all_res", multiplier=2),
        EncoderBlock("compress_all_res", multiplier=1),
        EncoderBlock("res_x"),
    ),
}


@pytest.mark.parametrize("blocks", SMALL_ENCODERS.values(), ids=SMALL_ENCODERS)
@pytest.mark.parametrize("pixels", [(17, 64, 96), (1, 96, 64)])
def test_encode_is_what_the_encoder_allocates(blocks: tuple[EncoderBlock, ...], pixels: tuple[int, ...]) -> None:
    config = VideoEncoderConfig(3, 8, 4, blocks, "zeros")
    encoder, clip = randomized(VideoEncoder(config)), torch.randn(1, 3, *pixels)
    predicted = ltx2_memory.encode_bytes(config, pixels, value_bytes=4) - memory.CONVOLUTION_WORKSPACE
    assert peak_of(lambda: encoder(clip)) + clip.nbytes == predicted


@pytest.mark.parametrize("version", ["2.0", "2.3", "2.0 conditioned", "2.3 conditioned"])
def test_denoising_is_what_the_transformer_allocates(version: str) -> None:
    later, conditioned = version.startswith("2.3"), version.endswith("conditioned")
    config = dataclasses.replace(
        TRANSFORMER_2_0,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        audio_attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        audio_in_channels=4,
        audio_out_channels=4,
        caption_channels=16,
        gated_attention=later,
        cross_attention_adaln=later,
        caption_projection=not later,
    )
    geometry = Geometry(latent_frames=7, latent_height=20, latent_width=30, fps=24.0, audio_tokens=9)
    transformer, tokens = randomized(LTX2Transformer(config)), geometry.video_tokens
    sigmas = torch.tensor([[0.5, 0.0]]) if conditioned else torch.tensor([0.5])
    rows = (torch.arange(tokens) < 600).long()[None] if conditioned else None

    def step() -> None:
        rope, sigma = transformer.rope_tables(geometry, "cpu", torch.float32), torch.tensor([0.5])
        text = [torch.randn(1, 32, width if later else 16) for width in (config.width, config.audio_width)]
        text_video, text_audio = transformer.prepare_text(text[0], "video"), transformer.prepare_text(text[1], "audio")
        video = Stream(torch.randn(1, tokens, 4), sigmas, sigma, text_video, rows)
        transformer(video, Stream(torch.randn(1, 9, 4), sigma, sigma, text_audio), rope)

    predicted = denoise_bytes(config, geometry, 32, 1, 4, conditioned) + rope_bytes(config, geometry, 4)
    predicted -= GUIDANCE_TENSORS * (tokens + 9) * 4 * 4  # of the loop, which is not here
    # The rest is the modulation's rows and the latents, which do not grow with the width of the tokens.
    assert peak_of(step) == pytest.approx(predicted, rel=0.05)


VOCODER_2_3 = VocoderConfig(
    16, 2, 64, (5, 2, 2, 2), (11, 4, 4, 4), (3, 7, 11), ((1, 3, 5),) * 3, output_sample_rate=16000, resblock="AMP1"
)


def test_audio_is_about_what_its_parts_allocate() -> None:
    small = dataclasses.replace(VOCODER_2_0, in_channels=16, initial_channels=64)
    vae = AudioDecoderConfig(32, (1, 2, 4), 2, 2, 4, 64, 16000, 160)
    encoder = randomized(AudioEncoder(AudioEncoderConfig(32, (1, 2, 4), 2, 2, 4, 64, 16000, 160, 1024)))
    for module, shape, predicted in (
        (Vocoder(small), (1, 2, 20, 8), ltx2_memory._vocoder_values(small, 20)),
        (Vocoder(VOCODER_2_3), (1, 2, 20, 8), ltx2_memory._vocoder_values(VOCODER_2_3, 20)),
        (AudioDecoder(vae), (1, 4, 20, 16), ltx2_memory.AUDIO_VAE_TENSORS * 80 * 64 * 32),
    ):
        module, x = randomized(module), torch.randn(shape)
        assert peak_of(lambda module=module, x=x: module(x)) == pytest.approx(predicted * 4, rel=0.1)  # type: ignore[misc]
    assert peak_of(lambda: encoder(torch.randn(1, 2, 77, 64))) < ltx2_memory.AUDIO_VAE_TENSORS * 80 * 64 * 32 * 4


def test_bandwidth_extension_computes_in_fp32_on_copies_of_weights() -> None:
    generator = dataclasses.replace(
        VOCODER_2_3, initial_channels=32, upsample_rates=(6, 5, 2, 2), output_sample_rate=48
    )
    generator = dataclasses.replace(generator, upsample_kernel_sizes=(12, 11, 4, 4), upsample_rates=(6, 5, 2, 2))
    first = dataclasses.replace(VOCODER_2_3, initial_channels=128)
    extension = BandwidthExtensionConfig(generator, 16000, 48000, 8, 64, 64, 40)
    config = dataclasses.replace(LTX_2_0, vocoder=first, bandwidth_extension=extension)
    module = randomized(BandwidthExtendedVocoder(first, extension)).bfloat16()
    geometry = dataclasses.replace(FULL, audio_tokens=5)
    small_vae = dataclasses.replace(LTX_2_0.audio_decoder, base_channels=1)  # so that it is not the larger part
    predicted = ltx2_memory.audio_bytes(dataclasses.replace(config, audio_decoder=small_vae), geometry, 2)
    mel = torch.randn(1, 2, 5 * 4, 8)
    assert peak_of(lambda: module(mel)) == pytest.approx(predicted - memory.CONVOLUTION_WORKSPACE, rel=0.1)


def test_tiled_decode_is_what_the_tiles_allocate() -> None:
    config, latents = SMALL_DECODERS["2.0"], (9, 4, 6)
    decoder, x = randomized(VideoDecoder(config)), torch.randn(1, config.latent_channels, *latents)
    tiles = plan_tiles(*latents, TileSettings(tile_size=128, tile_overlap=32, tile_frames=32, tile_frames_overlap=8))

    def decode() -> None:
        for frames in decode_tiled(decoder, x, tiles):
            written = frames.to(torch.uint8)  # held with its frames while the next group is decoded
        assert written.numel()

    predicted = ltx2_memory.tiled_decode_bytes(config, latents, tiles, value_bytes=4) - memory.CONVOLUTION_WORKSPACE
    assert len(tiles) > 8
    assert peak_of(decode) == pytest.approx(predicted, rel=0.08)


def test_largest_tensor_is_the_one_that_convolutions_refuse() -> None:
    assert ltx2_memory.largest_decode_tensor(DECODER_2_0, (16, 24, 40)) == 123 * 194 * 322 * 128
    assert ltx2_memory.largest_decode_tensor(DECODER_2_0, (33, 24, 40)) < memory.LARGEST_TENSOR
    assert ltx2_memory.largest_decode_tensor(DECODER_2_0, (36, 24, 40)) > memory.LARGEST_TENSOR


def test_text_normalisation_is_what_the_connectors_allocate() -> None:
    states, tokens, width = 7, 64, 48
    mask = torch.ones(1, tokens, dtype=torch.int64)

    def normalise() -> None:
        hidden = [torch.ones(1, tokens, width, dtype=torch.bfloat16) for _ in range(states)]
        normalise_states(torch.stack(hidden, dim=-1), mask)

    predicted = ltx2_memory.text_bytes(TextSizes(tokens, width, width, states), value_bytes=2)
    assert peak_of(normalise) == pytest.approx(predicted, rel=0.05)


def test_denoising_grows_with_what_is_in_it() -> None:
    def work(geometry: Geometry = FULL, contexts: int = 2, **changes: Any) -> int:
        return denoise_bytes(dataclasses.replace(TRANSFORMER_2_0, **changes), geometry, 1024, contexts, 2)

    cache = 2 * 48 * 1024 * (4096 + 2048) * 2
    assert work(contexts=2) - work(contexts=1) == cache + 1024 * (4096 + 2048) * 2
    assert work() - work(caption_projection=False) == 2 * cache  # 2.3 keeps no keys and values of the text
    keyframe = dataclasses.replace(FULL, keyframes=(8,))
    assert work(keyframe) - work() == 24 * 40 * (11 * 4096 * 2 + GUIDANCE_TENSORS * 128 * 4)
    assert work(dataclasses.replace(FULL, audio_tokens=0)) < work()


def test_images_cost_their_stage_and_rows_per_token() -> None:
    plain, conditioned = (
        estimate(LTX_2_0, FULL, GEMMA, TILES, value_bytes=2, contexts=2, encoded_frames=n, conditioned=bool(n))
        for n in (0, 1)
    )
    assert conditioned.denoise - plain.denoise == 3 * 15360 * 4096 * 2
    assert conditioned.encode_video == ltx2_memory.encode_bytes(ENCODER_2_0, (1, 768, 1280), 2)


def test_encoding_a_clip_takes_about_what_decoding_it_does() -> None:
    # The same three tensors of the finest level, and the pixels.
    clip = ltx2_memory.encode_bytes(ENCODER_2_0, (121, 768, 1280), 2)
    pixels = 121 * 768 * 1280 * 3 * 4  # which stay beside it in fp32
    assert clip == pytest.approx(ltx2_memory.decode_bytes(DECODER_2_0, (16, 24, 40), 2) + pixels, rel=0.01)
    image = ltx2_memory.encode_bytes(ENCODER_2_0, (1, 768, 1280), 2)
    assert image < clip / 20


def test_stages_that_a_run_lacks_are_left_out() -> None:
    def stages(geometry: Geometry = FULL, **options: Any) -> set[str]:
        activations = estimate(LTX_2_0, geometry, GEMMA, TILES, value_bytes=2, contexts=1, **options)
        return set(predict({}, activations).stages)

    assert stages() == {"text_encode", "denoise", "decode_video", "decode_audio"}
    assert stages(encoded_frames=1) == stages() | {"encode_video"}
    assert stages(encodes_sound=True) == stages() | {"encode_audio"}
    assert stages(dataclasses.replace(FULL, audio_tokens=0)) == stages() - {"decode_audio"}


def in_gib(**sizes: int) -> dict[str, int]:
    return {name: size * GIB for name, size in sizes.items()}


WEIGHTS = in_gib(text_encoder=40, connectors=5, transformer=60, video_decoder=3, audio_decoder=1, vocoder=2)


@pytest.fixture(autouse=True)
def no_workspace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small numbers to reckon with, for the tests that take ``work``."""
    if "work" in request.fixturenames:
        monkeypatch.setattr(memory, "CUBLAS_WORKSPACE", 0)


@pytest.fixture
def work() -> Activations:
    sizes = in_gib(
        text_encode=10,
        encode_video=0,
        encode_audio=0,
        denoise=20,
        decode_video_whole=90,
        decode_video_tile=30,
        decode_audio=7,
        kept=4,
    )
    return Activations(**sizes, largest_decode_tensor=1000, largest_encode_tensor=1000)


def test_everything_is_there_without_offload(work: Activations) -> None:
    prediction = predict(WEIGHTS, work, "none", "whole")
    assert prediction.stages == in_gib(
        text_encode=111 + 10,
        denoise=111 + 20,
        decode_video=111 + 90 + 4,
        decode_audio=111 + 7 + 4,
    )
    assert (prediction.peak, prediction.peak_stage) == (205 * GIB, "decode_video")


def test_the_text_encoder_is_alone_and_then_gone(work: Activations) -> None:
    assert predict(WEIGHTS, work, "text_encoder", "tile").stages == in_gib(
        text_encode=45 + 10,
        denoise=66 + 20,
        decode_video=66 + 30 + 4,
        decode_audio=66 + 7 + 4,
    )


def test_with_stages_each_has_only_its_own(work: Activations) -> None:
    assert predict(WEIGHTS, work, "stages", "whole").stages == in_gib(
        text_encode=45 + 10,
        denoise=60 + 20,
        decode_video=3 + 90 + 4,
        decode_audio=3 + 7 + 4,
    )


def test_a_clip_that_no_convolution_can_encode_is_refused(work: Activations) -> None:
    huge = dataclasses.replace(work, largest_encode_tensor=memory.LARGEST_TENSOR + 1)
    with pytest.raises(ConfigurationError, match=r"request\.video cannot be encoded at this size"):
        choose_decode("tile", WEIGHTS, huge, "none", 1000 * GIB)


def test_limits_of_a_stage_that_a_task_lacks_do_not_count(work: Activations) -> None:
    huge = dataclasses.replace(
        work, largest_encode_tensor=memory.LARGEST_TENSOR + 1, largest_decode_tensor=memory.LARGEST_TENSOR + 1
    )
    step = huge.without(["encode_video", "decode_video", "decode_audio", "text_encode", "encode_audio"])
    prediction, sentence = choose_decode("whole", WEIGHTS, step, "none", 1000 * GIB)
    assert set(prediction.stages) == {"denoise"} and sentence is None


def test_what_fits_passes_in_silence(work: Activations) -> None:
    fit(predict(WEIGHTS, work), free_bytes=205 * GIB, margin=0.0)
    fit(predict(WEIGHTS, work), free_bytes=206 * 2 * GIB, margin=0.5)


@pytest.mark.parametrize(
    "offload, decode, free, remedy",
    [
        ("none", "whole", 160, r"use model.offload=text_encoder \(160.0 GiB\)"),
        ("none", "whole", 100, r"use model.offload=stages \(97.0 GiB\)"),
        ("none", "whole", 80, r"use model.offload=stages parallel.vae_strategy=tile \(80.0 GiB\)"),
        ("text_encoder", "whole", 130, r"use model.offload=stages \(97.0 GiB\)"),
        ("stages", "whole", 90, r"use parallel.vae_strategy=tile \(80.0 GiB\)"),
        ("none", "tile", 121, r"use model.offload=text_encoder \(100.0 GiB\)"),
    ],
)
def test_the_first_remedy_that_fits_is_named(
    offload: Any, decode: Any, free: int, remedy: str, work: Activations
) -> None:
    prediction = predict(WEIGHTS, work, offload, decode)
    with pytest.raises(ConfigurationError, match=remedy):
        fit(prediction, free * GIB, margin=0.0)


def test_the_sentence_says_what_and_by_how_much(work: Activations) -> None:
    prediction = predict(WEIGHTS, work)
    with pytest.raises(ConfigurationError) as error:
        fit(prediction, 200 * GIB, margin=0.1)
    assert str(error.value) == (
        "the run needs 205.0 GiB of GPU memory in decode_video and 180.0 GiB can be used (200.0 GiB free), "
        "25.0 GiB too little; use model.offload=text_encoder (160.0 GiB)"
    )


def test_where_nothing_fits_the_largest_lever_is_named(work: Activations) -> None:
    smaller = r"even model.offload=stages parallel.vae_strategy=tile needs 80.0 GiB: ask for fewer num_frames"
    with pytest.raises(ConfigurationError, match=smaller):
        fit(predict(WEIGHTS, work), 70 * GIB, margin=0.0)
    with pytest.raises(ConfigurationError, match=r"its weights alone are 60.0 GiB, use a larger GPU"):
        fit(predict(WEIGHTS, work), 50 * GIB, margin=0.0)
    with pytest.raises(ConfigurationError, match=r"10.0 GiB too little; ask for fewer num_frames"):
        fit(predict(WEIGHTS, work, "stages", "tile"), 70 * GIB, margin=0.0)


def test_auto_decodes_whole_where_that_fits(work: Activations) -> None:
    prediction, sentence = choose_decode("auto", WEIGHTS, work, "none", free_bytes=205 * GIB, margin=0.0)
    assert prediction.decode == "whole" and sentence is None


def test_auto_falls_to_tiles_and_says_so(work: Activations) -> None:
    prediction, sentence = choose_decode("auto", WEIGHTS, work, "none", free_bytes=204 * GIB, margin=0.0)
    assert prediction.decode == "tile"
    assert sentence is not None
    assert sentence.startswith("decoded whole, the video needs 205.0 GiB of 204.0 GiB free GPU memory: decoding in til")


def test_the_margin_is_kept_free(work: Activations) -> None:
    assert choose_decode("auto", WEIGHTS, work, "none", free_bytes=228 * GIB, margin=0.1)[0].decode == "whole"
    assert choose_decode("auto", WEIGHTS, work, "none", free_bytes=227 * GIB, margin=0.1)[0].decode == "tile"
    with pytest.raises(ConfigurationError, match=r"205.0 GiB .* and 204.3 GiB can be used \(227.0 GiB free\)"):
        fit(predict(WEIGHTS, work), free_bytes=227 * GIB, margin=0.1)


def test_whole_asked_for_never_falls(work: Activations) -> None:
    prediction, sentence = choose_decode("whole", WEIGHTS, work, "none", free_bytes=GIB, margin=0.0)
    assert prediction.decode == "whole" and sentence is None
    with pytest.raises(ConfigurationError, match=r"use model.offload=stages parallel.vae_strategy=tile"):
        fit(prediction, free_bytes=90 * GIB, margin=0.0)


def test_tile_is_tile(work: Activations) -> None:
    prediction, sentence = choose_decode("tile", WEIGHTS, work, "none", free_bytes=1000 * GIB)
    assert prediction.decode == "tile" and sentence is None


def test_a_tensor_too_large_for_convolutions_is_never_decoded_whole(work: Activations) -> None:
    large = dataclasses.replace(work, largest_decode_tensor=2**31)
    prediction, sentence = choose_decode("auto", WEIGHTS, large, "none", free_bytes=1000 * GIB)
    assert prediction.decode == "tile" and sentence is not None and "2147483648 elements" in sentence
    with pytest.raises(ConfigurationError, match=r"vae_strategy=whole cannot decode this size.*use tile or auto"):
        choose_decode("whole", WEIGHTS, large, "none", free_bytes=1000 * GIB)


def test_one_line_for_the_console(work: Activations) -> None:
    line = describe(predict(WEIGHTS, work), 300 * GIB)
    assert line == (
        "memory: predicted peak 205.0 GiB in decode_video of 300.0 GiB free (model.offload=none, whole decode)"
    )


def test_weights_are_counted_in_the_dtype_they_will_have() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5), nn.BatchNorm1d(4))
    module[1].weight = module[0].weight  # tied: once
    floats, counter = 3 * 5 + 5 + 5 + 4 * 4, 8
    assert memory.weight_bytes(module, 2) == 2 * floats + counter
    assert memory.weight_bytes(module, 4) == 4 * floats + counter


def test_needs_no_torch() -> None:
    code = "import sys, vgen.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=False).returncode == 0
