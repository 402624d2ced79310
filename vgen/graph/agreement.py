"""Ranks that capture together agree on it first: the same call, the same key, the same decision.

A captured call runs its collectives several times, a replayed one once, so ranks that do different things wait for each
other on the device for ever. Keys are made of what all ranks of a group have alike, and the group asks itself on a miss
only: a replay exchanges nothing. Where one rank misses and another does not, the first waits on the host until its
timeout and fails; its peer's replay then waits for a rank that is gone, which ends it as any lost rank does.

What ranks say is kept in the store by which the job's ranks found each other: on the host, so that it neither waits for
the device nor disturbs the order of the device's collectives, and without a process group, which all ranks of the job
would have to make: torch names a group that its members make alone by how many groups each of them is in.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from vgen.graph.errors import GraphError

DECISIONS = ("capture", "eager", "refuse")

_made: Counter[tuple[int, ...]] = Counter()


class Agreement:
    """Of ``ranks``, each of which makes its agreements with the same others in the same order.

    ``timeout_s``: how far apart the ranks may arrive at one miss, compilation before it included.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float = 300.0) -> None:
        self._ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._name = f"vgen/agreement/{'-'.join(map(str, self._ranks))}/{_made[self._ranks]}"
        self._rounds = 0
        _made[self._ranks] += 1

    def check(self, call: int, key_digest: bytes, decision: str) -> None:
        """Return on every rank if all are at call number ``call`` with this key (32 bytes) and decision.

        Raises:
            GraphError: on every rank alike where they are not; on those that wait where a rank does not come.
        """
        store = dist.distributed_c10d._get_default_store()
        places = [f"{self._name}/{self._rounds}/{rank}" for rank in self._ranks]
        self._rounds += 1
        said = call.to_bytes(8, "big") + key_digest + bytes([DECISIONS.index(decision)])
        store.set(places[self._ranks.index(dist.get_rank())], said.hex())
        try:
            store.wait(places, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise GraphError(
                f"a call of the captured transformer is new to rank {dist.get_rank()} (call {call}, to {decision}) and "
                f"not all of the ranks {list(self._ranks)} said so within {self._timeout_s:g} s; "
                f"give all ranks of a group the same shapes, flags and weights"
            ) from error
        told = [bytes.fromhex(store.get(place).decode()) for place in places]
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
