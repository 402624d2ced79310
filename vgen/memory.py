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
from typing import TYPE_CHECKING, Any, Literal, Self

from vgen.parallel.plans import ParallelPlan
from vgen.parallel.tiles import TileSettings
from vgen.typed import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30
FP32_BYTES = 4

Offload = Literal["none", "text_encoder", "expert", "stages"]
Decode = Literal["whole", "tile", "tile_balanced", "halo"]
Strategy = Literal["auto", "whole", "tile", "tile_balanced", "halo"]
Side = Literal["height", "width"]

TILED: tuple[Decode, ...] = ("tile", "tile_balanced")
"""The decodes that go by tiles."""

DECODE_NAMES: Mapping[Decode, str] = MappingProxyType(
    {"whole": "whole", "tile": "in tiles", "tile_balanced": "in balanced tiles", "halo": "in bands"}
)
"""How a video is decoded, as a sentence says it."""

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

DIVIDED_FRAMES = 8
"""Frames of a sum of tiles over ranks that are divided by their weights at once."""

# What no module shows; all of it small beside the weights, and measured rather than derived.
CUBLAS_WORKSPACE = 32 * 2**20
"""Held from the first matrix product on (H100 and H200)."""
CONVOLUTION_WORKSPACE = 64 * 2**20
"""Scratch memory of cuDNN's choice of algorithm."""


@dataclass(frozen=True)
class Spread:
    """How a request is spread over ranks, as far as their memory depends on it.

    ``side``: which one the bands of ``halo`` cut; ``lines``: of the request's latents along it. ``halo_possible``:
    whether the VAE's implementation can be cut at all. ``fp32_sums``: whether tiles of several ranks are added up in
    fp32. A prediction is of the rank that needs most, the first one: it denoises, decodes and has the frames.
    """

    plan: ParallelPlan
    side: Side = "height"
    lines: int = 1
    halo_possible: bool = True
    fp32_sums: bool = False

    @property
    def shares_encode(self) -> bool:
        """Only where all ranks of a replica have a part: latents are needed by every rank that denoises."""
        return self.plan.vae_size > 1 and self.plan.vae_size == self.plan.replica_size

    @property
    def has_bands(self) -> bool:
        return self.plan.vae_size > 1 and self.halo_possible and self.lines >= self.plan.vae_size

    def band(self, latents: tuple[int, int, int]) -> tuple[int, int, int]:
        """The longest band of ``latents`` (frames, height, width), the first rank's."""
        frames, height, width = latents
        ranks = self.plan.vae_size
        return (frames, -(-height // ranks), width) if self.side == "height" else (frames, height, -(-width // ranks))

    def local_tokens(self, tokens: int) -> int:
        """Of a rank's part of ``tokens``, those included that fill it up."""
        return -(-tokens // self.plan.ulysses_size)

    def exchanged_passes(self, passes: int) -> int:
        """Outputs of passes that are alive while the ranks of CFG exchange them: own, packed and gathered."""
        if self.plan.cfg_size == 1 or passes == 1:
            return 0
        return -(-passes // self.plan.cfg_size) * (2 + self.plan.cfg_size)


ALONE = Spread(ParallelPlan())
"""One rank does everything."""


@dataclass(frozen=True)
class VaeWork:
    """``size``: bytes at the worst moment; ``largest_tensor``: elements, 0 where parts are as short as it takes."""

    size: int
    largest_tensor: int = 0


@dataclass(frozen=True)
class Activations:
    """Work of each stage at its worst moment, without weights; 0 or empty where a run has no such stage.

    ``encode_video``: of the longest clip, as it is encoded where videos are decoded so; without the decodes that cannot
    be, as ``decode_video``. ``kept``: what outlives the denoising: the transformer's position tables, and graphs.
    ``prompt``: of ``denoise``, what one of ``prompts`` texts is to the transformer.
    """

    text_encode: int
    encode_video: Mapping[Decode, VaeWork]
    encode_audio: int
    denoise: int
    decode_video: Mapping[Decode, VaeWork]
    decode_audio: int
    kept: int
    prompt: int = 0
    prompts: int = 1

    def with_graphs(self, transformers: int, *, whole_steps: bool) -> Self:
        """The same where calls of the transformers are captured: their work stays in the graphs' pool, which they
        share, and each has a copy of its inputs: of one text at a time, or of all where a step is one graph."""
        texts = self.prompts if whole_steps else 1
        copies = transformers * (texts * self.prompt + self.kept)
        pool = self.denoise - self.prompts * self.prompt - self.kept
        return replace(self, denoise=self.denoise + copies, kept=self.kept + copies + pool)

    def without(self, stages: Collection[str]) -> Self:
        """The same with no work in ``stages``, which a run does not have."""
        nothing: dict[str, Any] = {stage: {} if stage.endswith("_video") else 0 for stage in stages}
        return replace(self, **nothing)

    def of(self, stage: str, decode: Decode) -> int:
        found: int | Mapping[Decode, VaeWork] = getattr(self, stage)
        work = found if isinstance(found, int) else found[decode].size if found else 0
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
        f"(model.offload={prediction.offload}, decoded {DECODE_NAMES[prediction.decode]})"
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
    if decode in ("whole", "halo"):
        yield "parallel.vae_strategy=tile", predict(weights, activations, offload, "tile")
        for step in further:
            yield f"model.offload={step} parallel.vae_strategy=tile", predict(weights, activations, step, "tile")


@dataclass(frozen=True)
class Choice:
    """What ``parallel.vae_strategy`` comes to. ``reason``: one sentence without its full stop.

    ``falls_back``: to an approximation that nobody asked for.
    """

    decode: Decode
    reason: str
    falls_back: bool = False


Obstacle = Callable[[Decode], str | None]
"""What stands in the way of a decode at this size on this device; None if nothing does."""


def choose_decode(strategy: Strategy, spread: Spread = ALONE, obstacle: Obstacle = lambda _: None) -> Choice:
    """``auto`` is exact where nothing stands in the way, over all ranks that decode, and in tiles elsewhere.

    What is asked for is never changed for want of memory; of one rank ``halo`` is the whole decode.

    Raises:
        ConfigurationError: ranks are to share what cannot be shared so.
    """
    ranks = spread.plan.vae_size
    if strategy == "auto":
        return _choose_exact(spread, obstacle)
    if strategy == "whole" and ranks > 1:
        raise ConfigurationError(
            f"parallel.vae_strategy=whole decodes on one rank, and parallel.vae_size={ranks}; use halo, which is as "
            f"exact, or parallel.vae_size=1"
        )
    if strategy == "halo":
        if ranks == 1:
            return Choice("whole", "parallel.vae_strategy=halo with one rank is the whole decode")
        if no_bands := _no_bands(spread):
            raise ConfigurationError(
                f"parallel.vae_strategy=halo cannot share the decode: {no_bands}; use auto or tile, which approximate, "
                f"or parallel.vae_size=1"
            )
        return Choice("halo", f"parallel.vae_strategy=halo: {_bands(spread)}")
    return Choice(strategy, f"parallel.vae_strategy={strategy} was asked for")


def _choose_exact(spread: Spread, obstacle: Obstacle) -> Choice:
    ranks = spread.plan.vae_size
    if ranks == 1:
        if sentence := obstacle("whole"):
            return Choice("tile", f"{sentence}: decoding in tiles, an approximation", falls_back=True)
        return Choice("whole", "one rank decodes the whole video, which is exact")
    if sentence := _no_bands(spread) or obstacle("halo"):
        return Choice("tile", f"{sentence}: decoding in tiles over {ranks} ranks, an approximation", falls_back=True)
    return Choice("halo", f"exact, and all ranks have a part: {_bands(spread)}")


def _no_bands(spread: Spread) -> str | None:
    if not spread.halo_possible:
        return "this VAE cannot be cut into bands, which takes model.vae.backend=native"
    if not spread.has_bands:
        return f"{spread.lines} lines of latents along {spread.side} are too few for {spread.plan.vae_size} ranks"
    return None


def _bands(spread: Spread) -> str:
    ranks = spread.plan.vae_size
    return f"{ranks} ranks with up to {-(-spread.lines // ranks)} of the {spread.lines} lines along {spread.side} each"


def find_obstacle(
    weights: Mapping[str, int],
    activations: Activations,
    offload: Offload,
    free_bytes: int,
    margin: float = MARGIN,
) -> Obstacle:
    """What ``choose_decode`` asks: a tensor too large for convolutions, or too little memory."""

    def obstacle(decode: Decode) -> str | None:
        work = activations.decode_video.get(decode)
        if work is None:
            return None
        name = DECODE_NAMES[decode]
        if work.largest_tensor > LARGEST_TENSOR:
            return f"decoded {name}, {_too_large(work)}"
        needed = predict(weights, activations, offload, decode).stages["decode_video"]
        if fits(needed, free_bytes, margin):
            return None
        return (
            f"decoded {name}, the video needs {_gib(needed)} of {_gib(free_bytes)} free GPU memory "
            f"(parallel.vae_strategy={decode} insists)"
        )

    return obstacle


def validate_tensors(activations: Activations, decode: Decode) -> None:
    """Refuse what no convolution can take, whatever the memory.

    Raises:
        ConfigurationError: a tensor of the encode, or of a decode that was asked for, is too large.
    """
    encode, decoding = activations.encode_video.get(decode), activations.decode_video.get(decode)
    if encode is not None and encode.largest_tensor > LARGEST_TENSOR:
        raise ConfigurationError(
            f"request.video cannot be encoded at this size: {_too_large(encode)}; ask for fewer num_frames or a "
            f"smaller height and width"
        )
    if decoding is not None and decoding.largest_tensor > LARGEST_TENSOR:
        fix = "ask for a smaller model.vae.tile_size" if decode.startswith("tile") else "use tile or auto"
        raise ConfigurationError(
            f"parallel.vae_strategy={decode} cannot decode this size: decoded {DECODE_NAMES[decode]}, "
            f"{_too_large(decoding)}; {fix}"
        )


def _too_large(work: VaeWork) -> str:
    return f"one tensor has {work.largest_tensor} elements and convolutions take at most {LARGEST_TENSOR}"


@dataclass(frozen=True)
class DecodeAttempt:
    """One way to decode. ``chunk``: latent frames that Wan's VAE takes at a time, None as many as convolutions can.

    ``tiles``: the sizes of the decodes that go by tiles; without a meaning in others.
    """

    decode: Decode
    chunk: int | None
    tiles: TileSettings

    @property
    def settings(self) -> str:
        """What asks for it on a command line."""
        chunk = [f"model.vae.chunk={self.chunk}"] if self.chunk is not None else []
        return " ".join([*chunk, *([f"model.vae.tile_size={self.tiles.tile_size}"] if self.decode in TILED else [])])


def decode_ladder(attempt: DecodeAttempt, latent_frames: int, *, chunked: bool) -> tuple[DecodeAttempt, ...]:
    """What to try, one after another, where ``attempt`` ran out of memory; every rung needs less than the one before.

    Nothing gets worse than what was asked for: first the same result with chunks half as long each time, down to one
    latent frame. Only a decode in tiles, an approximation anyway, goes on with tiles half as large each time. Neither
    ranks nor a decode of another kind are to be had while a run goes.

    ``chunked``: whether the VAE goes by chunks, as Wan's does.
    """
    chunks = _halved(min(attempt.chunk or latent_frames, latent_frames), 1, 1) if chunked else ()
    rungs = [replace(attempt, chunk=chunk) for chunk in chunks]
    if attempt.decode in TILED:
        last, settings = (rungs or [attempt])[-1], attempt.tiles
        unit = max(settings.compression[1:])
        least = max(2 * unit, settings.tile_overlap + unit)
        rungs += [
            replace(last, tiles=replace(settings, tile_size=size)) for size in _halved(settings.tile_size, unit, least)
        ]
    return tuple(rungs)


def _halved(size: int, unit: int, least: int) -> tuple[int, ...]:
    """Halves of ``size``, halves of those and so on, in multiples of ``unit`` and not below ``least``."""
    half = size // 2 // unit * unit
    return (half, *_halved(half, unit, least)) if half >= least else ()


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
