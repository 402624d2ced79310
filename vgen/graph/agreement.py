"""Ranks that capture together agree on it first: the same call, the same key, the same decision.

A captured call runs its collectives several times, a replayed one once, so ranks that do different things wait for each
other on the device for ever. Keys are made of what all ranks of a group have alike, and the group asks itself on a miss
only: a replay exchanges nothing. Where one rank misses and another does not, the first waits on the host until its
timeout and fails; its peer's replay then waits for a rank that is gone, which ends it as any lost rank does.

The exchange runs on the host (gloo), in a group of its own, so that it neither waits for the device nor disturbs the
order of the device's collectives.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from vgen.graph.errors import GraphError

DECISIONS = ("capture", "eager", "refuse")


class Agreement:
    """Made by all of ``ranks``, and nobody else, at the same place of the program, as any process group is.

    ``timeout_s``: how far apart the ranks may arrive at one miss, compilation before it included.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float = 300.0) -> None:
        self._ranks = list(ranks)
        self._timeout_s = timeout_s
        self._group = dist.new_group(
            self._ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
        )

    def check(self, call: int, key_digest: bytes, decision: str) -> None:
        """Return on every rank if all are at call number ``call`` with this key (32 bytes) and decision.

        Raises:
            GraphError: on every rank alike where they are not; on those that wait where a rank does not come.
        """
        said = call.to_bytes(8, "big") + key_digest + bytes([DECISIONS.index(decision)])
        mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in self._ranks]
        try:
            dist.all_gather(everyone, mine, group=self._group)
        except RuntimeError as error:
            raise GraphError(
                f"a call of the captured transformer is new to rank {dist.get_rank()} (call {call}, to {decision}) and "
                f"not all of the ranks {self._ranks} said so within {self._timeout_s:g} s; "
                f"give all ranks of a group the same shapes, flags and weights"
            ) from error
        told = [bytes(one.tolist()) for one in everyone]
        if len(set(told)) > 1:
            raise GraphError(
                f"ranks would run a captured call differently: {self._lines(told)}; "
                f"give all ranks of a group the same shapes, flags and weights"
            )

    def _lines(self, told: list[bytes]) -> str:
        def line(rank: int, said: bytes) -> str:
            call, key, decision = int.from_bytes(said[:8], "big"), said[8:12].hex(), DECISIONS[said[-1]]
            return f"rank {rank} is at call {call}, key {key}, to {decision}"

        return ", ".join(map(line, self._ranks, told))
