"""A decode that runs out of memory is made again in a way that needs less, from the start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import tiny_wan
from tests.pipelines.test_ltx2_pipeline import ListSink, make_job
from tests.pipelines.test_wan_pipeline import wan_job
from vgen import transforms
from vgen.components import wan as built
from vgen.metrics.timer import null_timer
from vgen.pipelines import wan
from vgen.record import build_record
from vgen.residency import Residency
from vgen.stages.decode import DecodeVideo, Fallback, write_frames
from vgen.tasks.types import TaskContext

CPU = torch.device("cpu")
LATENTS = torch.zeros(1)


def groups(*numbers: int, out_of_memory: bool = False) -> DecodeVideo:
    def decode(_: Tensor) -> Iterator[Tensor]:
        for number in numbers:
            yield torch.full((1,), float(number))
        if out_of_memory:
            raise torch.OutOfMemoryError("no room")

    return decode


def written(decode: DecodeVideo, *fallbacks: Fallback) -> tuple[list[list[float]], str | None]:
    """What each call of the writer got, and the way that it came to."""
    calls: list[list[float]] = []

    def write(frames: Iterator[Tensor]) -> None:
        calls.append([])
        for frame in frames:
            calls[-1].append(float(frame))

    return calls, write_frames(write, decode, fallbacks, LATENTS, null_timer)


def test_a_fallback_begins_again() -> None:
    assert written(groups(1, 2)) == ([[1, 2]], None)
    smaller = Fallback("smaller", groups(1, 2))
    assert written(groups(1, out_of_memory=True), smaller) == ([[1], [1, 2]], "smaller")
    failing = Fallback("failing", groups(out_of_memory=True))
    assert written(groups(1, out_of_memory=True), failing, smaller) == ([[1], [], [1, 2]], "smaller")


def test_the_last_way_out_is_the_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        written(groups(out_of_memory=True), Fallback("also", groups(out_of_memory=True)))
    with pytest.raises(ValueError, match="another"):
        written(_raises, Fallback("never", groups(1)))


def _raises(_: Tensor) -> Iterator[Tensor]:
    raise ValueError("another error")
    yield


def test_wan_goes_on_with_shorter_chunks_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_wan.save_diffusers(tmp_path / "folder", "t2v_2_1")
    job = wan_job(tmp_path, folder, "t2v_2_1", "model.vae.chunk=3")
    decoders = transforms.build_decoders(job, CPU, Residency(CPU, {}, {}))
    assert [one.name for one in decoders.fallbacks] == ["model.vae.chunk=1"]
    latents = torch.randn(1, 16, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    usual, sink = ListSink(), ListSink()
    wan.decode(decoders, latents, None, usual, Residency(CPU, {}, {"video_decoder": torch.nn.Identity()}))
    assert not hasattr(usual, "fallback") and len(usual.chunks) == 1

    chunks, decode_chunk = [], built.VideoDecoder.decode_chunk

    def limited(self: built.VideoDecoder, part: Tensor, state: object) -> object:
        chunks.append(part.shape[2])
        if part.shape[2] > 1:
            raise torch.OutOfMemoryError("no room")
        return decode_chunk(self, part, state)  # type: ignore[arg-type]

    monkeypatch.setattr(built.VideoDecoder, "decode_chunk", limited)
    wan.decode(decoders, latents, None, sink, Residency(CPU, {}, {"video_decoder": torch.nn.Identity()}))
    assert sink.fallback == "model.vae.chunk=1" and chunks[-3:] == [1, 1, 1]
    torch.testing.assert_close(sink.frames, usual.frames)


def test_smaller_tiles_only_where_tiles_were_asked_for(tmp_path: Path) -> None:
    whole = make_job(tmp_path, "model=ltx2_tiny", "model.weights=random")
    assert transforms.build_decoders(whole, CPU, Residency(CPU, {}, {})).fallbacks == ()
    tiled = transforms.build_decoders(whole, CPU, Residency(CPU, {}, {}), "tile")
    assert [one.name for one in tiled.fallbacks] == ["model.vae.tile_size=256", "model.vae.tile_size=128"]


def test_the_record_of_a_run_names_its_fallbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vgen.components import ltx2
    from vgen.tasks import generate

    job = make_job(tmp_path, "model=ltx2_tiny", "model.weights=random", "parallel.vae_strategy=tile", "sampler.steps=1")
    decode, calls = ltx2.VideoDecoder.forward, []

    def limited(self: ltx2.VideoDecoder, latents: Tensor) -> Tensor:
        calls.append(latents.shape)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return decode(self, latents)

    monkeypatch.setattr(ltx2.VideoDecoder, "forward", limited)
    result = generate.run(TaskContext(job, CPU))
    assert result.active["decode_fallbacks"] == ["model.vae.tile_size=256"]
    assert (tmp_path / "sample_0.mp4").is_file()
    assert build_record(config={}, active=result.active)["active"]["decode_fallbacks"] == ["model.vae.tile_size=256"]
