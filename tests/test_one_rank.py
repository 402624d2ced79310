"""``benchmarks.one_rank``: one rank's share of the work, with nobody at the other end."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import one_rank
from vgen.parallel import collectives
from vgen.parallel.halo import exchange_lines
from vgen.parallel.halo_wan import gather_tokens
from vgen.typed import ConfigurationError

TINY = ("model=wan_tiny", "model.weights=random", "device=cpu", "request.num_frames=5", "bench.repeats=1")


def rows(folder: Path, ranks: int) -> list[str]:
    return [row["name"] for row in json.loads((folder / str(ranks) / "bench.json").read_text())["rows"]]


@pytest.mark.filterwarnings("ignore")  # of torch's fake backend
def test_each_number_of_ranks_has_its_rows(tmp_path: Path) -> None:
    assert one_rank.main(["--ranks", "2,4", "--out", str(tmp_path), "task=bench_step", *TINY]) == 0
    for ranks in (2, 4):
        assert f"vgen, Ulysses {ranks}" in rows(tmp_path, ranks)
    table = (tmp_path / "one_rank.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == [
        "vgen eager",
        "vgen, Ulysses 2",
        "vgen eager",
        "vgen, Ulysses 4",
    ]
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore")
def test_a_share_of_a_decode_takes_less_than_all_of_it(tmp_path: Path) -> None:
    overrides = ("task=bench_decode", "parallel.vae_strategy=halo", "parallel.vae_split=height", *TINY)
    one_rank.main(["--ranks", "8", "--out", str(tmp_path), *overrides])
    whole, *_, share = json.loads((tmp_path / "8" / "bench.json").read_text())["rows"]
    assert share["name"] == "vgen halo by height, 8 ranks"
    assert 0 < share["median_ms"] < whole["median_ms"]


@pytest.mark.filterwarnings("ignore")
def test_a_rank_gets_back_what_it_sent() -> None:
    """Values of the usual size: a GPU multiplies zeros faster."""
    before = dist.all_gather, dist.batch_isend_irecv, collectives._all_gather, dist.all_to_all_single
    sent = torch.randn(2, 4, 3, 5)
    with one_rank.FakeRanks(2):
        group = dist.group.WORLD
        assert group is not None
        (heads,) = collectives.heads_for_tokens([sent], group)
        assert heads.shape == (2, 2, 6, 5)
        assert torch.equal(collectives.tokens_for_heads(heads, group), sent)
        assert torch.equal(collectives.gather(sent, 1, group), torch.cat([sent, sent], dim=1))
        _, from_next = exchange_lines(sent[:, :, :1], sent[:, :, -1:], group)
        assert from_next is not None and torch.equal(from_next, sent[:, :, -1:])
        gathered = gather_tokens(sent, (3, 3), group)
        assert torch.equal(gathered, torch.cat([sent, sent], dim=-2))
    assert before == (dist.all_gather, dist.batch_isend_irecv, collectives._all_gather, dist.all_to_all_single)


@pytest.mark.filterwarnings("ignore")
def test_every_rank_and_how_far_the_slowest_is_above_their_mean(tmp_path: Path) -> None:
    overrides = (
        "model=ltx2_tiny", "model.architecture.vae.decoder_base_channels=8", "task=bench_decode", *TINY[1:3],
        "request.num_frames=9", "bench.repeats=1", "parallel.vae_strategy=tile", "model.vae.tile_size=96",
    )  # fmt: skip
    one_rank.main(["--ranks", "2", "--every-rank", "--out", str(tmp_path), *overrides])
    first, second = (one_rank.read_rows(one_rank.folder_of(tmp_path, 2, rank))[-1] for rank in (0, 1))
    assert first["name"] == second["name"] == "vgen tile, 2 ranks"
    table = (tmp_path / "one_rank.md").read_text().splitlines()
    serial, shared = (next(line for line in table if name in line) for name in (" tiles |", "vgen tile, 2 ranks"))
    slowest = max(first["median_ms"], second["median_ms"])
    mean = (first["median_ms"] + second["median_ms"]) / 2
    assert f"| {slowest:.1f} |" in shared and shared.endswith(f"| {slowest / mean - 1:.1%} |")
    # Tiles are compared with tiles.
    assert " | 1.00 | " in serial


def test_refuses_what_has_no_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="task=generate is no benchmark of parts"):
        one_rank.main(["--ranks", "2", "--out", str(tmp_path), *TINY])
    with pytest.raises(ConfigurationError, match="ulysses_size=3 does not divide the 8 heads"):
        one_rank.main(["--ranks", "3", "--out", str(tmp_path), "task=bench_step", *TINY])
