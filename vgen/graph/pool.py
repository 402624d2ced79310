"""Memory that graphs share: what one needs while it runs, the next one uses again."""

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING

from vgen.graph.backend import Backend

if TYPE_CHECKING:
    from vgen.graph.cuda_graph import CudaGraphs


class GraphPool:
    """The pool of one or more ``CudaGraphs`` that never run at the same time, such as those of Wan's two experts.

    The device's memory goes back when the last graph has left; until then a pool keeps its largest size, which all of
    its graphs use in turn. ``owners``: those that capture into it and are alive.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.owners: weakref.WeakSet[CudaGraphs] = weakref.WeakSet()
        self._handle: Hashable = None
        self._graphs = 0

    @property
    def handle(self) -> Hashable:
        """Of the next capture. A pool that its last graph has left is gone and must not be named again."""
        if not self._graphs or self._handle is None:
            self._handle = self.backend.new_pool()
        return self._handle

    def enter(self) -> None:
        self._graphs += 1

    def leave(self) -> None:
        self._graphs -= 1

    @property
    def num_bytes(self) -> int:
        return self.backend.pool_bytes(self._handle) if self._graphs else 0
