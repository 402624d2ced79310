"""Where the weights of a module are, to be compared with later: a recording reads them at these addresses for good."""

import operator
from typing import Any

from torch import Tensor, nn


class WeightAddresses:
    """The submodules, parameters and buffers of a module and the addresses of their values, as they are now.

    Held for as long as the recording is, which may not outlive them either. Comparing asks the device nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        entries: list[tuple[Any, str, Any]] = [
            (registry, name, item)
            for part in module.modules()
            for registry in (part._modules, part._parameters, part._buffers)
            for name, item in registry.items()
        ]
        self._registries = [registry for registry, _, _ in entries]
        self._names = [name for _, name, _ in entries]
        self._items = [item for _, _, item in entries]
        self._tensors = [item for item in self._items if isinstance(item, Tensor)]
        self._addresses = self._current()

    def unchanged(self) -> bool:
        """Whether every name still has the same object, and every tensor its values at the same address."""
        found: map[Any] = map(dict.get, self._registries, self._names)
        return all(map(operator.is_, found, self._items)) and self._current() == self._addresses

    def _current(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))
