"""Names for the collectives of a rank, noted where the supervisor finds them when a rank fails or does not come.

What is noted is the host's side: on the CPU a rank is inside a collective until it is done, on CUDA until it is queued.
A replayed CUDA graph passes no host code and notes nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from launchers.notes import NoteWriter, start_notes

_writer: NoteWriter | None = None
_collectives: dict[tuple[str, ProcessGroup], "_Collective"] = {}
_timeouts_s: dict[str, float] = {}
_OFF = nullcontext()


def start_watch(out_dir: Path) -> None:
    """Begin this rank's note in ``out_dir``; to be called once the world's process group is there.

    Without this, and in a world of one rank, nothing is noted and no file is made.
    """
    global _writer
    if dist.is_initialized() and dist.get_world_size() > 1:
        _collectives.clear()
        _writer = start_notes(out_dir, dist.get_rank())


def know_timeout(group: ProcessGroup, timeout_s: float) -> None:
    """Let messages say how long the ranks of ``group`` wait for each other."""
    _timeouts_s[group.group_name] = timeout_s


def collective(name: str, group: ProcessGroup | None = None) -> AbstractContextManager[None]:
    """Around the calls of one exchange, which every rank of ``group`` makes under the same name; None: all ranks.

    Costs about a microsecond. An error leaves the note as it is: the collective is where it happened.
    """
    # Not for a compiler: it would break its graph, or compile the note of one call in.
    if torch.compiler.is_compiling() or _writer is None:
        return _OFF
    group = group or dist.distributed_c10d._get_default_group()
    known = _collectives.get((name, group))
    if known is None:
        known = _collectives[name, group] = _Collective(_writer, name, group)
    return known


class _Collective:
    def __init__(self, writer: NoteWriter, name: str, group: ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._writer = writer
        self._group = writer.group(group.group_name, ranks, _timeouts_s.get(group.group_name))
        self._name = writer.name(name)

    def __enter__(self) -> None:
        if self._group:
            self._writer.enter(self._group, self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group and kind is None:
            self._writer.leave(self._group)
