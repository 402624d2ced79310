"""Jobs of real ranks in which one fails or does not come: how soon all end, and who is named."""

import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from launchers.failure import RankFailure
from launchers.notes import note_file, read_note
from launchers.supervisor import JobFailed, run_ranks
from vgen.parallel import watch

WORKER = Path(__file__).with_name("watched_worker.py")
TIMEOUT_S = 2.0  # of the worker
GRACE_S = 1.0
QUERIES = "'ulysses: queries, keys and values'"


def run(folder: Path, world_size: int, scenario: str) -> None:
    command = [sys.executable, str(WORKER), str(folder), scenario]
    run_ranks(command, world_size=world_size, out_dir=folder, console=False, grace_s=GRACE_S)


def failure(folder: Path, world_size: int, scenario: str) -> RankFailure:
    """Of a job that ends soon after its ranks began to wait for each other, with all its processes."""
    with pytest.raises(JobFailed) as caught:
        run(folder, world_size, scenario)
    waited_s = time.time() - max(path.stat().st_mtime for path in folder.glob("waiting*"))
    assert waited_s < 15.0  # on a machine that is busy with other things; a rank that hangs does so for ten minutes
    for rank in range(world_size):
        assert not Path("/proc", (folder / f"rank{rank}.pid").read_text()).exists()
    return caught.value.failure


def test_a_rank_raises_while_others_wait(tmp_path: Path) -> None:
    found = failure(tmp_path, 2, "raise")
    assert (found.rank, found.kind, found.stage, found.collective) == (1, "SpoiltError", "denoise", None)
    assert found.message == "rank is spoilt"


def test_a_rank_raises_inside_a_collective(tmp_path: Path) -> None:
    found = failure(tmp_path, 2, "raise_inside")
    assert (found.rank, found.kind, found.stage) == (1, "RuntimeError", "denoise")
    assert found.message == "in 'ulysses: velocity' (no. 3): Invalid scalar type"


def test_a_rank_is_killed(tmp_path: Path) -> None:
    found = failure(tmp_path, 2, "kill")
    assert (found.rank, found.kind, found.stage, found.signal) == (1, "RankKilled", "denoise", 9)
    assert found.message is not None
    assert found.message.endswith(f", after {QUERIES} (no. 2)")


def test_a_rank_ends_too_early(tmp_path: Path) -> None:
    found = failure(tmp_path, 2, "exit")
    assert (found.rank, found.kind, found.exit_code) == (1, "RankStalled", 0)
    assert found.message == (
        f"did not come to {QUERIES} (no. 3) in denoise; it was last in {QUERIES} (no. 2) of denoise, and has ended"
    )


def test_a_rank_sleeps_for_ever(tmp_path: Path) -> None:
    """Rank 0 waits for it; ranks 2 and 3 have nothing to do with it any more."""
    found = failure(tmp_path, 4, "sleep")
    assert (found.rank, found.kind, found.stage) == (1, "RankStalled", "denoise")
    assert found.message == (
        f"did not come to {QUERIES} (no. 3) in denoise within 2 s; it was last in 'cfg: passes' (no. 3) of denoise"
    )
    assert found.log == tmp_path / "ranks" / "rank1.log"


def test_a_rank_is_stopped(tmp_path: Path) -> None:
    """Ranks 0 and 2 wait for its lines."""
    found = failure(tmp_path, 3, "stop")
    assert (found.rank, found.kind, found.stage) == (1, "RankStalled", "decode_video")
    assert found.message == (
        "did not come to 'halo: lines' (no. 3) in denoise within 2 s; "
        "it was last in 'halo: lines' (no. 2) of denoise and then in decode_video"
    )


def test_a_late_rank_is_waited_for_between_requests(tmp_path: Path) -> None:
    run(tmp_path, 2, "late")
    for rank in range(2):
        note = read_note(note_file(tmp_path, rank))
        assert note is not None
        timeouts = {(one.collective, one.count): one.timeout_s for one in note.groups.values()}
        assert timeouts["wait for the replica", 1] == 1800
        assert timeouts["ulysses: queries, keys and values", 1] == TIMEOUT_S


def test_without_a_watch_nothing_is_noted(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    watch.start_watch(tmp_path)
    with watch.collective("cfg: passes"):
        pass
    assert not list(tmp_path.iterdir())
