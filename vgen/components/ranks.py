"""What a rank builds and does by its place in the mesh: its share of encodes and decodes, and latents handed over."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vgen.graph.agreement import Agreement
from vgen.graph.apply import apply_graph, capture_step
from vgen.graph.backend import CudaBackend
from vgen.graph.pool import GraphPool
from vgen.job import Job
from vgen.memory import GIB, Decode, DecodeAttempt, decode_ladder
from vgen.models.plan import Plan
from vgen.parallel.balance import plan_grid
from vgen.parallel.guidance import build_run_passes
from vgen.parallel.mesh import Mesh
from vgen.parallel.tile_parallel import decode_tiles_parallel, encode_tiles_parallel
from vgen.parallel.tiles import Tile, TileSettings, decode_tiled, encode_tiled
from vgen.parallel.ulysses import apply_ulysses
from vgen.parallel.vae import from_vae
from vgen.parallel.watch import collective
from vgen.stages.decode import DecodeVideo, Fallback
from vgen.stages.run_passes import RunPasses, run_serially

ALONE = Mesh(0, 0, 0, 0, None, None, None, None)
"""The place of the only rank."""


@dataclass(frozen=True)
class VaeShare:
    """How this rank's part of encodes and decodes is done. ``mesh``: its place; ``strategy``: what the job decided."""

    job: Job
    mesh: Mesh
    strategy: Decode
    settings: TileSettings

    @property
    def shares_encode(self) -> bool:
        """Only where all ranks of a replica have a part: latents are needed by every rank that denoises."""
        plan = self.job.plan
        return self.mesh.vae is not None and plan.vae_size == plan.replica_size and self.strategy != "whole"

    def adapt(self, vae: nn.Module) -> Any:
        """``vae`` in bands over the ranks where that is the strategy, else ``vae``."""
        if self.strategy != "halo":
            return vae
        return from_vae(vae, self.job.config.parallel.vae_split, self.mesh.vae)

    def grid(self, latent_frames: int, latent_height: int, latent_width: int) -> tuple[Tile, ...]:
        """The tiles of latents of this size, the same on all ranks."""
        sizes = (latent_frames, latent_height, latent_width)
        return plan_grid(sizes, self.settings, self.job.plan.vae_size, balanced=self.strategy == "tile_balanced")

    def decode_tiles(self, decode: Callable[[Tensor], Tensor], latents: Tensor) -> Iterator[Tensor]:
        """Groups of frames from tiles; all of them at once, and on the first rank, where several ranks share them."""
        _, _, latent_frames, latent_height, latent_width = latents.shape
        tiles = self.grid(latent_frames, latent_height, latent_width)
        with torch.no_grad():
            if self.mesh.vae is None:
                yield from decode_tiled(decode, latents, tiles)
                return
            sum_dtype = torch.float32 if self.job.config.parallel.tile_sum == "fp32" else None
            frames = decode_tiles_parallel(
                decode, latents, tiles, self.mesh.vae, to_first_only=True, sum_dtype=sum_dtype
            )
        if frames is not None:
            yield frames

    def encode_tiles(self, encode: Callable[[Tensor], Tensor], frames: Tensor) -> Tensor:
        """Latents from tiles, on every rank."""
        time, space, _ = self.settings.compression
        tiles = self.grid((frames.shape[2] - 1) // time + 1, frames.shape[3] // space, frames.shape[4] // space)
        if not self.shares_encode:
            return encode_tiled(encode, frames, tiles)
        latents = encode_tiles_parallel(encode, frames, tiles, self.mesh.vae)
        assert latents is not None
        return latents


def fallbacks(
    share: VaeShare, chunk: int | None, latent_frames: int, *, chunked: bool, build: Callable[[VaeShare], DecodeVideo]
) -> tuple[Fallback, ...]:
    """Decodes of the same quality that need less memory, the first one to try first; none over ranks, which could not
    agree on one in the middle of a decode. ``build``: of the job in the share that it gets."""
    if share.mesh.vae is not None:
        return ()
    ladder = decode_ladder(DecodeAttempt(share.strategy, chunk, share.settings), latent_frames, chunked=chunked)
    return tuple(Fallback(rung.settings, build(_with_rung(share, rung))) for rung in ladder)


def _with_rung(share: VaeShare, rung: DecodeAttempt) -> VaeShare:
    config = share.job.config
    model = replace(config.model, vae=replace(config.model.vae, chunk=rung.chunk))
    return replace(share, job=replace(share.job, config=replace(config, model=model)), settings=rung.tiles)


def own_parts(parts: Iterator[Tensor | None]) -> Iterator[Tensor]:
    """The parts that this rank gets; a rank that gets none works all the same, until there are no more."""
    for part in parts:
        if part is not None:
            yield part


def transform(
    transformer: nn.Module,
    plan: Plan,
    job: Job,
    device: torch.device,
    mesh: Mesh,
    pool: GraphPool | None = None,
) -> None:
    """Spread the tokens of a loaded ``transformer`` over the ranks, compile it, capture it: in this order, in place.

    ``pool``: of another transformer that never runs at the same time.
    """
    apply_ulysses(transformer, plan, mesh.ulysses)
    apply_graph(transformer, plan, job.config.graph, device, agreement=agreement_of_calls(mesh), pool=pool)


def captured_step(
    run: Callable[..., Any], transformer: nn.Module, job: Job, mesh: Mesh, pool: GraphPool | None
) -> Callable[..., Any]:
    """``run``, a step of ``transformer``, as one graph where ``graph.scope`` asks for it; else ``run`` itself."""
    if pool is None or job.config.graph.scope != "step":
        return run
    return capture_step(run, transformer, job.config.graph, pool, agreement=agreement_of_steps(job, mesh))


def agreement_of_calls(mesh: Mesh) -> Agreement | None:
    """Of the ranks that a call of the transformer has exchanges with."""
    return None if mesh.ulysses is None else Agreement(dist.get_process_group_ranks(mesh.ulysses))


def agreement_of_steps(job: Job, mesh: Mesh) -> Agreement | None:
    """Of all ranks of a replica that denoise: they exchange passes in a step, and have to capture it together."""
    size, first = job.plan.denoise_size, mesh.data_rank * job.plan.replica_size
    return Agreement(range(first, first + size)) if size > 1 else None


def graph_pool(job: Job, device: torch.device) -> GraphPool | None:
    """The memory that captured transformers share; None where nothing is captured."""
    return GraphPool(CudaBackend(device)) if job.config.graph.captures else None


def graph_report(pool: GraphPool | None) -> dict[str, Any]:
    """Of all graphs of the run so far: ``cuda_graphs`` held, ``graph_gib`` of their pool and inputs, ``capture_s``."""
    stats = [] if pool is None else [graphs.stats() for graphs in pool.owners]
    held = (0 if pool is None else pool.num_bytes) + sum(one.input_bytes for one in stats)
    return {
        "cuda_graphs": sum(len(one.graph_bytes) for one in stats),
        "graph_gib": held / GIB,
        "capture_s": sum(one.capture_s for one in stats),
    }


def is_first(mesh: Mesh) -> bool:
    """Whether this is the rank of its replica that has the frames and writes the files."""
    return mesh.vae_rank == 0


def denoises(mesh: Mesh) -> bool:
    return mesh.cfg_rank is not None


def passes_over(mesh: Mesh) -> RunPasses:
    """How the passes of a step are run: over the ranks of CFG, or one after another."""
    return run_serially if mesh.cfg is None else build_run_passes(mesh.cfg)


def hand_over(job: Job, mesh: Mesh) -> Callable[[Tensor], None]:
    """What a denoising rank does with the final latents where others only decode: give them to those."""
    if job.plan.vae_size <= job.plan.denoise_size or mesh.vae is None:
        return lambda _: None
    group = mesh.vae

    def give(latents: Tensor) -> None:
        header = [(tuple(latents.shape), latents.dtype)]
        mesh.wait_for_replica()
        with collective("hand over: latents", group):
            dist.broadcast_object_list(header, _first(group), group, latents.device)
            # A copy: every denoising rank has these latents, and all but the first would overwrite its own.
            dist.broadcast(latents.clone(memory_format=torch.contiguous_format), _first(group), group)

    return give


def receive(mesh: Mesh, device: torch.device) -> Tensor:
    """The final latents, on a rank that only decodes."""
    assert mesh.vae is not None
    header: list[Any] = [None]
    mesh.wait_for_replica()  # for as long as the denoising takes
    with collective("hand over: latents", mesh.vae):
        dist.broadcast_object_list(header, _first(mesh.vae), mesh.vae, device)
        shape, dtype = header[0]
        latents = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(latents, _first(mesh.vae), mesh.vae)
    return latents


def _first(group: dist.ProcessGroup) -> int:
    return dist.get_global_rank(group, 0)
