"""Weights that live in host memory and visit the device while somebody uses them.

A visiting module keeps one host copy of each storage for good. ``use`` copies it to the device and points the module's
parameters and buffers there; leaving points them back at the host copy, so leaving moves nothing: weights are read only
here, and what a caller writes to them during a visit is lost. Parameters stay the same objects, and every tensor keeps
its place in its storage: tied weights, views and memory formats such as channels-last come back with the same strides
and the same bits.

While a module is away its tensors are on the host. Called with CUDA inputs it fails, because torch refuses to mix
devices; nothing computes on the CPU by mistake. Each visit has new addresses, so a captured CUDA graph must not outlive
it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")

PREFETCH_MARGIN = 2 * 2**30
"""Bytes that ``prefetch`` leaves to the work beside it."""


class ResidencyError(ValueError):
    """A module is not known, or shares weights with one that stays elsewhere."""


@dataclass(frozen=True, eq=False)
class _Visitor:
    """A module whose weights travel. ``places``: each tensor, the index of its storage, and its view of the host's."""

    storages: list[Tensor]
    """Host memory, uint8, one per storage."""
    places: list[tuple[Tensor, int, Tensor]]

    def move_to(self, device: torch.device) -> None:
        """Point all tensors at fresh copies on ``device``, queued on its current stream."""
        copies = [torch.empty_like(storage, device=device) for storage in self.storages]
        for copy, storage in zip(copies, self.storages, strict=True):
            copy.copy_(storage, non_blocking=True)
        for tensor, index, on_host in self.places:
            tensor.data = _like(on_host, copies[index])

    @property
    def num_bytes(self) -> int:
        return sum(storage.numel() for storage in self.storages)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that ``stream`` uses the copies, too."""
        for tensor, _, _ in self.places:
            tensor.record_stream(stream)

    def move_home(self) -> None:
        for tensor, _, on_host in self.places:
            tensor.data = on_host


class Residency:
    """Says where each named module's weights are; ``resident`` ones stay, ``visiting`` ones are parked at once.

    ``active``: whether modules travel at all; by default they do unless ``device`` is the host itself.

    Raises:
        ResidencyError: a visiting module shares a tensor with another one.
    """

    def __init__(
        self,
        device: torch.device,
        resident: Mapping[str, nn.Module],
        visiting: Mapping[str, nn.Module],
        *,
        active: bool | None = None,
    ) -> None:
        self._device = device
        self._active = device.type != HOST.type if active is None else active
        self._modules: dict[str, nn.Module] = {}
        self._travelling: set[str] = set()
        self._visitors: dict[str, _Visitor] = {}
        self._arriving: dict[str, torch.cuda.Event] = {}
        self._users: Counter[str] = Counter()
        for name, module in resident.items():
            self.keep(name, module)
        for name, module in visiting.items():
            self.park(name, module)

    def keep(self, name: str, module: nn.Module) -> None:
        """Add ``module``, whose weights stay where they are; ``use`` of it does nothing.

        Raises:
            ResidencyError: it shares a tensor with a module that travels.
        """
        self._add(name, module, travels=False)

    def park(self, name: str, module: nn.Module) -> None:
        """Add ``module`` and move its weights to the host: right after loading, so that the next one has the room.

        Raises:
            ResidencyError: it shares a tensor with another module.
        """
        self._add(name, module, travels=True)
        if self._active:
            visitor = self._visitors[name] = _pack(module, pinned=self._device.type == "cuda")
            visitor.move_home()

    @contextmanager
    def use(self, *names: str) -> Iterator[None]:
        """Have the weights of ``names`` on the device; uses nest and overlap, and the last to leave takes them away.

        Entering waits until the copies are there, so that a timer around it reads the whole visit.

        Raises:
            ResidencyError: an unknown name.
        """
        for name in names:
            self._check(name)
        entered: list[str] = []
        try:
            for name in names:
                self._enter(name)
                entered.append(name)
            if self._active and self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            yield
        finally:
            for name in reversed(entered):
                self._leave(name)

    def prefetch(self, name: str) -> bool:
        """Begin to bring the weights of ``name``, beside what the device does; the next ``use`` of it has less to wait
        for. Does nothing where the device has no room for them, and says whether it did.

        Raises:
            ResidencyError: an unknown name.
        """
        self._check(name)
        travels = self._device.type == "cuda" and name in self._visitors
        if not travels or self._users[name] or name in self._arriving:
            return False
        visitor = self._visitors[name]
        free, _ = torch.cuda.mem_get_info(self._device)
        # What the allocator holds and does not use is room as well.
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if visitor.num_bytes > free - PREFETCH_MARGIN:
            return False
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            visitor.move_to(self._device)
        # The blocks are of the other stream's pool, and are used and freed on this one.
        visitor.record(torch.cuda.current_stream(self._device))
        self._arriving[name] = stream.record_event()
        return True

    def _enter(self, name: str) -> None:
        if name in self._arriving:
            torch.cuda.current_stream(self._device).wait_event(self._arriving.pop(name))
        elif name in self._visitors and not self._users[name]:
            self._visitors[name].move_to(self._device)
        self._users[name] += 1

    def _leave(self, name: str) -> None:
        self._users[name] -= 1
        if name in self._visitors and not self._users[name]:
            self._visitors[name].move_home()

    def _check(self, name: str) -> None:
        if name not in self._modules:
            raise ResidencyError(f"'{name}' is no module of this run; known are {', '.join(sorted(self._modules))}")

    def _add(self, name: str, module: nn.Module, *, travels: bool) -> None:
        if name in self._modules:
            raise ResidencyError(f"'{name}' is placed already; place each module once")
        tensors = {id(tensor) for tensor in _tensors(module)}
        for other, placed in self._modules.items():
            shared = any(id(tensor) in tensors for tensor in _tensors(placed))
            if shared and (travels or other in self._travelling):
                raise ResidencyError(
                    f"'{name}' and '{other}' share weights, and one of them is to leave the device: "
                    f"place both as one module"
                )
        self._modules[name] = module
        if travels:
            self._travelling.add(name)


def _pack(module: nn.Module, *, pinned: bool) -> _Visitor:
    """Copy every storage under ``module`` to the host once, whatever number of its tensors look at it."""
    storages: list[Tensor] = []
    seen: dict[int, int] = {}
    places = []
    for tensor in _tensors(module):
        source = tensor.untyped_storage()
        if source.data_ptr() not in seen:
            seen[source.data_ptr()] = len(storages)
            host = torch.empty(source.nbytes(), dtype=torch.uint8, device=HOST, pin_memory=pinned)
            storages.append(host.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source)))
        index = seen[source.data_ptr()]
        places.append((tensor, index, _like(tensor, storages[index])))
    return _Visitor(storages, places)


def _like(tensor: Tensor, storage: Tensor) -> Tensor:
    """A tensor over ``storage``'s bytes with the dtype, offset, shape and strides of ``tensor``."""
    view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return view.set_(storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, the non-persistent ones too, each object once."""
    found = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return list(found.values())
