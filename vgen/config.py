"""One frozen record for each configuration group; the values themselves live in ``conf/``.

``vgen.app`` turns the composed configuration into a :class:`Config` once; nothing behind it sees Hydra or OmegaConf.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vgen import typed

VaeStrategy = Literal["auto", "whole", "tile", "tile_balanced", "halo"]


@dataclass(frozen=True)
class TextEncoderConfig:
    """``checkpoint``: folder or hub id of Gemma-3; ``null`` takes the one inside a diffusers folder."""

    checkpoint: str | None
    revision: str | None
    max_length: int
    """Text tokens; shorter prompts are padded, longer ones are cut with a warning."""
    architecture: dict[str, Any] | None


@dataclass(frozen=True)
class VaeConfig:
    backend: Literal["native", "diffusers"]
    """``diffusers`` for Wan only: its ``AutoencoderKLWan`` in place of the modules of this package."""
    tile_size: int
    """Pixels of a tile along the long side."""
    tile_overlap: int
    tile_frames: int | None = None
    """Frames of a tile; None does not cut along time."""
    tile_frames_overlap: int = 0
    chunk: int | None = None
    """Wan's latent frames at a time, of which the result does not depend; None takes as many as convolutions can."""


@dataclass(frozen=True)
class RequestDefaults:
    """What ``request`` takes where the user says nothing."""

    height: int
    width: int
    num_frames: int
    fps: float
    negative_prompt: str
    image_crf: int
    """H.264 quality that an image is compressed with before it is encoded, as the model was trained; 0 is off."""
    audio: Literal["generate", "none"]


@dataclass(frozen=True)
class GuidanceConfig:
    """Guidance of one modality; docs/guidance.md has the formula and which passes run when."""

    cfg_scale: float
    """1 turns classifier-free guidance off."""
    stg_scale: float
    """0 turns spatio-temporal guidance off."""
    stg_blocks: tuple[int, ...]
    """Transformer blocks, from 0, whose self-attention the perturbed pass leaves out."""
    modality_scale: float
    """1 turns guidance away from the isolated modality off."""
    rescale_scale: float
    """0 turns the rescale off."""
    skip_step: int
    """Steps between two that compute this modality; 0 computes all."""


@dataclass(frozen=True)
class SamplerConfig:
    """LTX-2's: ``sampler=default``."""

    steps: int
    schedule: Literal["official", "diffusers", "distilled"]
    sigmas: tuple[float, ...] | None
    """A list of your own, falling to 0, in place of steps and schedule."""
    video: GuidanceConfig
    audio: GuidanceConfig


@dataclass(frozen=True)
class FlowSamplerConfig:
    """Wan's: ``sampler=unipc`` or ``sampler=euler``."""

    solver: Literal["unipc", "euler"]
    steps: int
    schedule: Literal["official", "diffusers"]
    """The sigmas before the shift: the official code's begin at 0.999, those of diffusers at 1."""
    shift: float
    guidance_scale: float
    """1 turns classifier-free guidance off. With two experts it is the first one's, that of high noise."""
    guidance_scale_2: float | None
    """Of the second expert, that of low noise; None where there is one transformer."""


@dataclass(frozen=True)
class ModelConfig:
    name: str
    family: Literal["ltx2", "wan"]
    version: Literal["2.0", "2.1", "2.2", "2.3"]
    kind: Literal["dev", "distilled", "t2v", "i2v", "ti2v"]
    """What ``sampler_defaults`` suit, and what Wan's transformer takes besides text; a checkpoint that says what it is
    has to be of this kind."""
    checkpoint: str | None
    """Local path (single file or diffusers folder), ``vgen://<path>`` inside the package, or hub id
    (``Lightricks/LTX-2/ltx-2-19b-dev.safetensors``)."""
    revision: str | None
    weights: Literal["load", "random"]
    weights_seed: int
    architecture: dict[str, Any] | None
    """Sizes for ``weights=random``, in the words of the official files' metadata; a checkpoint brings its own."""
    text_encoder: TextEncoderConfig
    vae: VaeConfig
    attention: Literal["sdpa", "cudnn", "flash", "fa3", "fa4"]
    offload: Literal["none", "text_encoder", "expert", "stages"]
    """``text_encoder``: all prompts are encoded first and it is freed; ``expert``: of Wan's two transformers only the
    one at work is on the device; ``stages``: only the stage at work is. The rest waits in host memory."""
    request_defaults: RequestDefaults
    sampler_defaults: dict[str, Any]
    """What the sampler takes where the user says nothing."""
    allow_pickle: bool = False
    """Whether Wan's original ``.pth`` files may be read, with ``weights_only=True``."""
    boundary: float | None = None
    """Wan's two experts: the part of 1000 that a timestep has to reach for the first one, that of high noise."""
    residual: Literal["fp32", "model"] = "fp32"
    """Wan's tokens from block to block: in fp32 as in the official code, or in the model's dtype as in diffusers."""


@dataclass(frozen=True)
class ParallelConfig:
    data_size: int
    cfg_size: int
    ulysses_size: int
    vae_size: int
    vae_strategy: VaeStrategy
    """``halo`` decodes and encodes in bands, exactly; ``tile`` and ``tile_balanced`` in overlapping tiles, an
    approximation; ``whole`` on one rank. ``auto``: exact where it fits, over all ranks that decode."""
    vae_split: Literal["auto", "height", "width"]
    """Which side ``halo`` cuts; ``auto`` by the cost."""
    tile_sum: Literal["model", "fp32"]
    """Precision of the sums of tiles over ranks, and of what travels for them."""
    single_pass: Literal["refuse", "ulysses"]
    """What the ranks of CFG do where the requests have one guidance pass only: nothing, which is refused, or split its
    tokens."""

    @property
    def world_size(self) -> int:
        return max(self.data_size * self.cfg_size * self.ulysses_size, self.vae_size)


@dataclass(frozen=True)
class QuantConfig:
    mode: Literal["fp32", "bf16"]


@dataclass(frozen=True)
class GraphConfig:
    mode: Literal["eager", "compile", "cuda", "compile_cuda"]
    """``compile``: torch.compile; ``cuda``: calls of the transformer are captured as CUDA graphs and replayed;
    ``compile_cuda``: both, the compiled code inside the graphs."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"]
    """torch.compile's own; the second one tries more kernels, for minutes."""
    compile_scope: Literal["block", "transformer"]
    """What is compiled as one: a block, once for all that are alike, or the whole transformer."""
    scope: Literal["transformer", "step"]
    """What a graph captures: one call of the transformer; a whole step is not built."""
    warmup: int
    """Eager calls of a shape before it is captured; 1 or more."""
    max_graphs: int
    """Graphs that one transformer keeps, one for each combination of shapes and flags; the one used longest ago goes
    first."""
    strict: bool
    """Whether a shape that the warm-up did not see is an error; if not, there is a warning and ``on_miss``."""
    on_miss: Literal["capture", "eager"]
    """What happens to a shape that the warm-up did not see."""

    @property
    def compiles(self) -> bool:
        return self.mode in ("compile", "compile_cuda")

    @property
    def captures(self) -> bool:
        return self.mode in ("cuda", "compile_cuda")


@dataclass(frozen=True)
class ImageConfig:
    """One image to keep: pixel frame ``frame`` becomes it, fully at ``strength`` 1, not at all at 0."""

    path: str
    frame: int = 0
    strength: float = 1.0


@dataclass(frozen=True)
class RequestConfig:
    prompt: str
    negative_prompt: str
    prompts_file: str | None
    image: str | None
    """Short for one entry of ``images``: the first frame, strength 1."""
    images: tuple[ImageConfig, ...]
    image_crf: int
    video: str | None
    """A clip to start from instead of from noise alone."""
    noise_level: float
    """Of ``video``'s latents at the start: 1 keeps nothing of the clip."""
    audio: Literal["generate", "copy", "none"]
    sound: str | None
    """File with the sound for ``copy``, or to start ``generate`` from beside ``video``; null takes ``video``'s own."""
    seed: int
    height: int
    width: int
    num_frames: int
    fps: float


@dataclass(frozen=True)
class OutputConfig:
    save: tuple[Literal["mp4", "latents", "frames"], ...]
    video_crf: int
    video_preset: str
    audio_bitrate: int


@dataclass(frozen=True)
class LoggerConfig:
    name: Literal["wandb", "none"]
    project: str
    mode: Literal["auto", "online", "offline"]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class BenchConfig:
    warmup: int
    repeats: int
    peers: tuple[Literal["diffusers"], ...]
    graphs: tuple[Literal["cuda", "compile", "compile_cuda"], ...]
    """``bench_step`` only: modes of ``graph`` that are timed beside eager calls, in this order."""
    steps: bool
    """``bench_step`` only: whether ``graphs`` are timed with whole steps: all passes, guidance and the solver."""


@dataclass(frozen=True)
class MeasureConfig:
    drift: bool
    """Whether the record says how far the ranks are apart at each step, in one more run of the first request."""


@dataclass(frozen=True)
class ClipSize:
    num_frames: int
    height: int
    width: int


@dataclass(frozen=True)
class StageTraining:
    """How one stage is trained: AdamW, a learning rate that rises over ``warmup_steps`` and falls by a cosine."""

    steps: int
    warmup_steps: int
    batch_size: int
    learning_rate: float
    autocast: bool
    """bf16 for matrix products and convolutions, on CUDA only."""


@dataclass(frozen=True)
class TrainStages:
    video_vae: StageTraining
    audio_vae: StageTraining
    vocoder: StageTraining
    diffusion: StageTraining
    upsampler: StageTraining


@dataclass(frozen=True)
class TrainConfig:
    """``task=train_tiny``: docs of each stage are in ``vgen/tiny/training``."""

    stage: Literal["video_vae", "audio_vae", "vocoder", "diffusion", "upsampler", "export"]
    folder: str | None
    """Where the stages keep their state; a stage goes on from its own and reads those before it."""
    seed: int
    minutes: float | None
    """Wall-clock limit of a stage's steps, after which its state is stored."""
    sizes: tuple[ClipSize, ...]
    """Sizes of the clips of the VAEs, one after another; the first is also the upsampler's, and what is measured on."""
    diffusion_sizes: tuple[ClipSize, ...]
    """Sizes of the clips that the diffusion learns to make, one after another."""
    table_clips: int
    """Clips of each size that are made before the steps: videos for the video VAE, latents for the stages after it."""
    table_captions: int
    """Wordings of each of them."""
    sigma_shift: float
    """Centre of the logit-normal noise levels. The schedules' own: 2.05 for LTX-2, ln 5 = 1.6 for Wan."""
    caption_dropout: float
    unknown_words: float
    """Part of the captions in which some words are unknown ones."""
    image_conditioning: float
    """Part of the samples whose first latent frame is given, as for image-to-video."""
    judged_clips: int
    """Captions of each split whose clips are looked at while the diffusion is trained."""
    upsampler_channels: int
    stages: TrainStages


@dataclass(frozen=True)
class ScoreConfig:
    """``task=score``: how many clips of each part; 0 leaves it out."""

    seen: int
    """Captions whose (colour, shape, motion) the training shows."""
    held_out: int
    """Captions of the 40 that it never shows."""
    image: int
    """First frames to go on from."""
    round_trips: int
    """Clips through encoders and decoders."""


@dataclass(frozen=True)
class TaskConfig:
    name: Literal[
        "generate", "decode", "bench_decode", "bench_encode", "bench_step", "train_tiny", "score", "plan", "preflight"
    ]
    latents: str | None
    """``decode`` only: a latents file, or the folder of the run that wrote it."""
    num_gpus: int | None = None
    """``plan`` only: of how many GPUs; None takes as many as the plan of ``parallel`` has."""
    records: str | None = None
    """``plan`` only: a folder with earlier runs, whose records correct the predictions."""

    @property
    def generates(self) -> bool:
        """Whether it makes videos of prompts, for which it needs all of the model."""
        return self.name in ("generate", "score", "preflight")

    @property
    def needs_weights(self) -> bool:
        """Whether it has to do with the model's own weights, and the machine's GPUs."""
        return self.name not in ("plan", "preflight")


@dataclass(frozen=True)
class LauncherConfig:
    inline: bool
    """Run the only rank inside the parent process, for a debugger."""
    dry_run: bool
    """Write ``job.json`` and stop, for a launcher of your own."""
    grace_s: float
    collective_timeout_s: float
    """How long a rank waits for the others in one exchange of a stage, after which the job ends."""
    cpu_threads: int | None


@dataclass(frozen=True)
class Config:
    task: TaskConfig
    model: ModelConfig
    parallel: ParallelConfig
    quant: QuantConfig
    graph: GraphConfig
    sampler: SamplerConfig | FlowSamplerConfig
    request: RequestConfig
    output: OutputConfig
    logger: LoggerConfig
    bench: BenchConfig
    measure: MeasureConfig
    train: TrainConfig
    score: ScoreConfig
    launcher: LauncherConfig
    device: Literal["auto", "cpu", "cuda"]
    debug: bool


def from_mapping(data: Mapping[str, Any]) -> Config:
    """Raises ConfigurationError: see :func:`vgen.typed.build`."""
    config: Config = typed.build(Config, data)
    return config


def to_mapping(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)
