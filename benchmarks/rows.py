"""The rows of the headline table: which run each one is, what was published of it, and what it is to reach; torch-free.

The published figures are those that TensorRT-LLM's pull requests 15753 (tiles), 12653 (graphs) and 16066 (halo) state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["decode", "steps", "run"]
"""``decode``: lines of a bench.json; ``steps``: the late steps of one request; ``run``: a whole warm request."""

LATE_STEPS = slice(20, None)
"""What ``steps`` is the median of, as published: of 40, those of the steady state."""

_TRANSFORMER = "model.architecture.transformer"
# Eight lines of latents, one for each of eight ranks, and two tiles along both sides.
_TINY_LTX2 = (
    "model=ltx2_tiny", "model.architecture.vae.decoder_base_channels=8", "request.height=256", "request.width=256",
    "request.num_frames=9", "model.vae.tile_size=160",
)  # fmt: skip
# Ulysses 8 has to divide the heads.
_EIGHT_HEADS = (
    f"{_TRANSFORMER}.num_attention_heads=8", f"{_TRANSFORMER}.attention_head_dim=20",
    f"{_TRANSFORMER}.audio_num_attention_heads=8", f"{_TRANSFORMER}.audio_attention_head_dim=12",
)  # fmt: skip
_TINY_WAN = (
    "model=wan_tiny", "model.architecture.vae.base_dim=8", "model.architecture.vae.decoder_base_dim=8",
    "request.height=128", "request.width=128", "request.num_frames=5", "model.vae.tile_size=80",
    "model.vae.tile_overlap=32",
)  # fmt: skip
_ONCE = ("bench.warmup=0", "bench.repeats=1")
# One cold request and one warm.
_TWICE = ("bench.warmup=0", "bench.repeats=2", "sampler.steps=2")


@dataclass(frozen=True)
class Row:
    """One run of ``experiment`` with ``settings`` on ``gpus``, and about how long it takes with its start.

    ``tiny``: settings that make it a dry run. ``baseline``: the row that it is compared with; ``decode`` rows have
    their baseline in the same process. ``compiles``: whether it takes graphs, which dry runs leave out.
    """

    name: str
    kind: Kind
    experiment: str
    gpus: int
    estimate_s: float
    settings: tuple[str, ...]
    tiny: tuple[str, ...]
    baseline: str | None = None
    compiles: bool = False

    def overrides(self, *, tiny: bool, device: str) -> tuple[str, ...]:
        """What follows ``python -m vgen.run``, but for the folder."""
        settings = self.settings
        if self.compiles and (tiny or device == "cpu"):
            settings = (*(one for one in settings if not one.startswith("graph=")), "graph=eager")
        own = (f"experiment={self.experiment}", *settings, *(self.tiny if tiny else ()))
        return (*own, f"device={device}", "logger=none")


def _decode(family: str, gpus: int, estimate_s: float) -> Row:
    tiny = _TINY_LTX2 if family == "ltx2" else _TINY_WAN
    settings = (f"parallel.vae_size={gpus}",)
    return Row(
        f"{family}_decode_{gpus}", "decode", f"vae_scaling_{family}", gpus, estimate_s, settings, (*tiny, *_ONCE)
    )  # fmt: skip


def _ltx2_run(vae_size: int) -> Row:
    settings, baseline = (f"parallel.vae_size={vae_size}",), None if vae_size == 1 else "ltx2_run_vae1"
    tiny = (*_TINY_LTX2, *_TWICE)
    return Row(f"ltx2_run_vae{vae_size}", "run", "plan_end_to_end_ltx2", 8, 120, settings, tiny, baseline, True)


def _wan_run(steps: int, vae_size: int, estimate_s: float) -> Row:
    name = f"wan_run_{steps}_vae{vae_size}"
    baseline = None if vae_size == 1 else f"wan_run_{steps}_vae1"
    settings = (f"sampler.steps={steps}", f"parallel.vae_size={vae_size}")
    return Row(name, "run", "plan_end_to_end_wan", 4, estimate_s, settings, (*_TINY_WAN, *_TWICE), baseline)


def _ltx2_steps(graph: str, baseline: str | None) -> Row:
    tiny = (*_TINY_LTX2, *_EIGHT_HEADS, "sampler.steps=2")
    return Row(f"ltx2_steps_{graph}", "steps", "graph_drift_ltx2", 8, 130, (f"graph={graph}",), tiny, baseline, True)


ROWS: tuple[Row, ...] = (
    _decode("ltx2", 8, 60),
    _decode("wan", 4, 90),
    _ltx2_run(8),
    _ltx2_run(1),
    _ltx2_steps("compile_cuda", "ltx2_steps_compile"),
    _ltx2_steps("compile", None),
    _decode("ltx2", 4, 50),
    _decode("ltx2", 2, 45),
    _wan_run(10, 4, 50),
    _wan_run(10, 1, 50),
    _wan_run(50, 4, 80),
    _wan_run(50, 1, 80),
    _decode("wan", 8, 90),
    _decode("wan", 2, 90),
    Row(
        "wan_decode_4_diffusers", "decode", "vae_scaling_wan", 4, 90,
        ("parallel.vae_size=4", "parallel.vae_strategy=halo", "model.vae.backend=diffusers"), (*_TINY_WAN, *_ONCE),
    ),
    _decode("ltx2", 1, 40),
    _decode("wan", 1, 75),
)  # fmt: skip
"""What matters most comes first. Decodes on one GPU come last: every other decode row has one of its own."""


def chosen(patterns: Sequence[str], rows: Sequence[Row] = ROWS) -> list[Row]:
    """The rows whose names one of ``patterns`` matches (``*`` for any text), in the order of ``rows``.

    Raises:
        ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(row.name, pattern) for row in rows):
            raise ValueError(f"--rows: {pattern!r} is no row; use some of {', '.join(row.name for row in rows)}")
    return [row for row in rows if any(fnmatchcase(row.name, pattern) for pattern in patterns)]


# ---------------------------------------------------------------- ways of a decode row

WAYS = ("whole", "tiles", "halo by height", "halo by width", "tile", "tile_balanced")
"""``tiles``: one after another on one rank; the others but ``whole`` are over all ranks."""


def way_of(line: str) -> str | None:
    """Which way a row of bench.json is; None for those that the table leaves out."""
    name = line.removeprefix("vgen").removeprefix(",").strip().partition(", ")[0]
    if name in ("whole", "chunk 1"):
        return "whole"
    if name.endswith(" tiles"):
        return "tiles"
    return name if name in WAYS else None


@dataclass(frozen=True)
class Goal:
    """``least`` times as fast as ``way`` on one GPU in the same process."""

    way: str
    least: float


_TILES_8, _HALO_8, _HALO_4 = Goal("tiles", 6.8), Goal("whole", 7.2), Goal("whole", 3.5)

GOALS: Mapping[tuple[str, str], Goal] = {
    ("ltx2_decode_8", "tile"): _TILES_8,
    ("ltx2_decode_8", "tile_balanced"): _TILES_8,
    ("ltx2_decode_8", "halo by height"): _HALO_8,
    ("ltx2_decode_8", "halo by width"): _HALO_8,
    ("wan_decode_4", "halo by height"): _HALO_4,
    ("wan_decode_4", "halo by width"): _HALO_4,
}

_WAN_HALO = "2.88 × (2735 → 951 ms), 54.3 dB, 4 GB200"
PUBLISHED: Mapping[tuple[str, str], str] = {
    ("ltx2_decode_8", "tile"): "6.74 × (873 → 129 ms), about 4.0 GB a rank, 8 B200",
    ("ltx2_decode_1", "tiles"): "873 ms, B200",
    ("wan_decode_1", "whole"): "2735 ms, GB200",
    ("wan_decode_4", "halo by height"): _WAN_HALO,
    ("wan_decode_4", "halo by width"): _WAN_HALO,
    ("wan_decode_4_diffusers", "halo by width"): "channels-last halo 1.31 ×, 4 GB200",
    ("ltx2_run_vae8", "run"): "−0.80 s, about 10 %, 8 B200",
    ("ltx2_steps_compile_cuda", "steps"): "−4.1 ms a step, drift 10–20 → 0.02 ms, 8 B200, FP4",
    ("wan_run_10_vae4", "run"): "1.65 ×, 50.4 dB, 4 GB200",
    ("wan_run_50_vae4", "run"): "1.18 ×, 57.1 dB, 4 GB200",
}
"""By row and way, or kind."""

NATIVE_OF: Mapping[str, str] = {"wan_decode_4_diffusers": "wan_decode_4"}
"""Rows of another backend's VAE, and the row of ours to put beside them, way by way."""
