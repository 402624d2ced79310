"""Peak memory of a run predicted from sizes alone, before anything is loaded.

Bytes everywhere. A stage holds the weights that are on the device while it runs, what its modules keep between calls,
and the work of its worst moment; the run's peak is that of its largest stage. What is alive at a worst moment was read
off the modules, whose tensors are named here; the constants are what no module shows. Needs no torch.

The figures are of tensors, as ``torch.cuda.max_memory_allocated`` counts them. What the allocator holds beyond them
and the CUDA context have to fit in the margin.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Self

from vgen.typed import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30
FP32_BYTES = 4

Offload = Literal["none", "text_encoder", "expert", "stages"]
Decode = Literal["whole", "tile"]
Strategy = Literal["auto", "whole", "tile"]

STAGE_WEIGHTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text_encode": ("text_encoder", "connectors"),
        "encode_video": ("image_encoder", "video_encoder"),
        "encode_audio": ("audio_encoder",),
        "denoise": ("transformer", "transformer_2"),
        "decode_video": ("video_decoder",),
        "decode_audio": ("audio_decoder", "vocoder"),
    }
)
"""The components that each stage computes with, which is also what ``Residency.use`` has to bring for it."""

VISITING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": (),
        "text_encoder": STAGE_WEIGHTS["text_encode"],
        "expert": STAGE_WEIGHTS["denoise"],
        "stages": tuple(name for names in STAGE_WEIGHTS.values() for name in names),
    }
)
"""The components that are not on the device while no stage of theirs runs, by ``model.offload``.

``stages`` and ``expert`` keep them in host memory; ``text_encoder`` encodes all prompts before anything else is loaded,
and frees it. Of two transformers only one is on the device at a time.
"""

MARGIN = 0.05
"""Part of the free memory that a prediction leaves alone: fragments, and what is predicted too low."""

LARGEST_TENSOR = 2**31 - 1
"""Elements above which cuDNN's convolutions fail, whatever the memory."""

# What no module shows; all of it small beside the weights, and measured rather than derived.
CUBLAS_WORKSPACE = 32 * 2**20
"""Held from the first matrix product on (H100 and H200)."""
CONVOLUTION_WORKSPACE = 64 * 2**20
"""Scratch memory of cuDNN's choice of algorithm."""


@dataclass(frozen=True)
class Activations:
    """Work of each stage at its worst moment, without weights; 0 where a run has no such stage.

    ``kept``: what outlives the denoising in the transformer, its position tables. ``largest_*_tensor``: elements, in
    the whole decode and in the encode of the longest clip.
    """

    text_encode: int
    encode_video: int
    encode_audio: int
    denoise: int
    decode_video_whole: int
    decode_video_tile: int
    decode_audio: int
    kept: int
    largest_decode_tensor: int
    largest_encode_tensor: int

    def without(self, stages: Collection[str]) -> Self:
        """The same with no work in ``stages``, which a run does not have."""
        of_stage = {
            "decode_video": ("decode_video_whole", "decode_video_tile", "largest_decode_tensor"),
            "encode_video": ("encode_video", "largest_encode_tensor"),
        }
        return replace(self, **{name: 0 for stage in stages for name in of_stage.get(stage, (stage,))})

    def of(self, stage: str, decode: Decode) -> int:
        work: int = getattr(self, f"decode_video_{decode}" if stage == "decode_video" else stage)
        return work + self.kept if work and stage.startswith("decode") else work


@dataclass(frozen=True)
class Prediction:
    """``stages``: bytes on the device at each stage's worst moment; the rest is what they were predicted from."""

    stages: Mapping[str, int]
    weights: Mapping[str, int]
    activations: Activations
    offload: Offload
    decode: Decode

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=lambda stage: self.stages[stage])

    @property
    def peak(self) -> int:
        return self.stages[self.peak_stage]


def predict(
    weights: Mapping[str, int], activations: Activations, offload: Offload = "none", decode: Decode = "whole"
) -> Prediction:
    """``weights``: bytes by component, named as in ``STAGE_WEIGHTS``; without those that the run does not build."""
    visiting = VISITING[offload]
    resident = sum(size for name, size in weights.items() if name not in visiting)
    stages = {}
    for stage, names in STAGE_WEIGHTS.items():
        work = activations.of(stage, decode)
        if work:
            visitors = [weights.get(name, 0) for name in names if name in visiting]
            # The experts take turns.
            brought = max(visitors, default=0) if stage == "denoise" else sum(visitors)
            loaded = 0 if offload == "text_encoder" and stage == "text_encode" else resident
            stages[stage] = loaded + brought + work + CUBLAS_WORKSPACE
    return Prediction(stages, weights, activations, offload, decode)


def describe(prediction: Prediction, free_bytes: int) -> str:
    """One line for the console."""
    return (
        f"memory: predicted peak {_gib(prediction.peak)} in {prediction.peak_stage} of {_gib(free_bytes)} free "
        f"(model.offload={prediction.offload}, {'tiled' if prediction.decode == 'tile' else 'whole'} decode)"
    )


def fits(needed: int, free_bytes: int, margin: float = MARGIN) -> bool:
    return needed <= free_bytes * (1 - margin)


def fit(prediction: Prediction, free_bytes: int, margin: float = MARGIN) -> None:
    """Refuse a run that cannot fit into ``free_bytes`` of device memory, measured before anything is loaded.

    Raises:
        ConfigurationError: what does not fit, by how much, and the first setting that would make it fit.
    """
    if fits(prediction.peak, free_bytes, margin):
        return
    room = int(free_bytes * (1 - margin))
    levers = list(_levers(prediction))
    remedy = next((f"use {name} ({_gib(lever.peak)})" for name, lever in levers if lever.peak <= room), None)
    if remedy is None:
        best, least = min(levers, key=lambda lever: lever[1].peak, default=("", prediction))
        even = f"even {best} needs {_gib(least.peak)}: " if best else ""
        weights = least.peak - least.activations.of(least.peak_stage, least.decode)
        smaller = "ask for fewer num_frames or a smaller height and width"
        remedy = even + (smaller if weights < room else f"its weights alone are {_gib(weights)}, use a larger GPU")
    raise ConfigurationError(
        f"the run needs {_gib(prediction.peak)} of GPU memory in {prediction.peak_stage} and {_gib(room)} can be used "
        f"({_gib(free_bytes)} free), {_gib(prediction.peak - room)} too little; {remedy}"
    )


def _levers(prediction: Prediction) -> Iterator[tuple[str, Prediction]]:
    """Settings that need less, each with its prediction: what changes no result first."""
    weights, activations, offload, decode = (
        prediction.weights,
        prediction.activations,
        prediction.offload,
        prediction.decode,
    )
    steps: tuple[Offload, ...] = ("none", "text_encoder", "expert", "stages")
    further = [step for step in steps[steps.index(offload) + 1 :] if step != "expert" or "transformer_2" in weights]
    for step in further:
        yield f"model.offload={step}", predict(weights, activations, step, decode)
    if decode == "whole":
        yield "parallel.vae_strategy=tile", predict(weights, activations, offload, "tile")
        for step in further:
            yield f"model.offload={step} parallel.vae_strategy=tile", predict(weights, activations, step, "tile")


def choose_decode(
    strategy: Strategy,
    weights: Mapping[str, int],
    activations: Activations,
    offload: Offload,
    free_bytes: int,
    margin: float = MARGIN,
) -> tuple[Prediction, str | None]:
    """``auto`` decodes whole where that fits and in tiles where it does not, with the sentence that says so.

    Raises:
        ConfigurationError: a tensor of the encode, or of the whole decode that was asked for, is larger than
            convolutions can be.
    """
    encoded = activations.largest_encode_tensor
    if encoded > LARGEST_TENSOR:
        raise ConfigurationError(
            f"request.video cannot be encoded at this size: one tensor has {encoded} elements and convolutions take at "
            f"most {LARGEST_TENSOR}; ask for fewer num_frames or a smaller height and width"
        )
    whole, tile = (predict(weights, activations, offload, decode) for decode in ("whole", "tile"))
    if strategy == "tile":
        return tile, None
    elements = activations.largest_decode_tensor
    if elements > LARGEST_TENSOR:
        reason = f"decoded whole, one tensor has {elements} elements and convolutions take at most {LARGEST_TENSOR}"
        if strategy == "whole":
            raise ConfigurationError(f"parallel.vae_strategy=whole cannot decode this size: {reason}; use tile or auto")
        return tile, f"{reason}: decoding in tiles, an approximation"
    needed = whole.stages.get("decode_video", 0)
    if strategy == "whole" or fits(needed, free_bytes, margin):
        return whole, None
    return tile, (
        f"decoded whole, the video needs {_gib(needed)} of {_gib(free_bytes)} free GPU memory: decoding in tiles "
        f"({_gib(tile.stages['decode_video'])}), an approximation; parallel.vae_strategy=whole insists"
    )


def weight_bytes(module: "nn.Module", value_bytes: int, keep_float32: Callable[[str], bool] | None = None) -> int:
    """Bytes of ``module``'s parameters and buffers once loaded with floating-point values of ``value_bytes``.

    The module may be on the meta device in any dtype; tensors that it ties together count once. ``keep_float32``: which
    parameters are loaded in fp32 nevertheless.
    """
    total = 0
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        kept = keep_float32 is not None and keep_float32(name)
        size = FP32_BYTES if kept else value_bytes
        total += tensor.numel() * (size if tensor.is_floating_point() else tensor.element_size())
    return total


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
