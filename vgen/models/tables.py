"""Position tables that a model keeps from call to call."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Table = TypeVar("Table")


class TableCache(Generic[Table]):
    """The tables used most recently, at most ``size`` of them; an attribute of the model, so freed with it."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._tables: OrderedDict[Hashable, Table] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def get(self, key: Hashable, build: Callable[[], Table]) -> Table:
        """Return the table of ``key``, built now if it is not kept."""
        if key not in self._tables:
            self._tables[key] = build()
            if len(self._tables) > self.size:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]
