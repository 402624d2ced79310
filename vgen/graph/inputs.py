"""Input buffers of captured graphs: tensors at fixed addresses that a call's own tensors are copied into.

Graphs of one owner never run at the same time, so they share buffers: the text's keys and values, a gigabyte at full
size, lie there once for all passes and shapes that read the same kind of text.
"""

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from vgen.graph.tree import Path, map_tensors


class InputBuffer:
    """One tensor of a call as the graphs read it, with the shape and strides of the caller's.

    ``constant``: nothing writes to the caller's tensor. It is copied only where another one came last. Tensors that are
    not constant are copied at every call, since not everything that writes to a tensor says so: a replayed graph and a
    collective leave its version as it was.
    """

    def __init__(self, like: Tensor, constant: bool) -> None:
        once = _once(like)
        self.target = torch.empty_strided(once.shape, once.stride(), dtype=like.dtype, device=like.device)
        self.tensor = self.target if once is like else self.target.expand(like.shape)
        self.constant = constant
        self._source: weakref.ref[Tensor] | None = None
        self._seen: tuple[int, int] = (0, 0)

    def holds(self, source: Tensor) -> bool:
        """Whether ``source`` was copied last, and is as it was."""
        if not self.constant or self._source is None or self._source() is not source:
            return False
        return self._seen == (source._version, source.data_ptr())

    def remember(self, source: Tensor) -> None:
        # A tensor of inference mode counts no versions, so whether somebody wrote to it is not known.
        if self.constant and not source.is_inference():
            self._source, self._seen = weakref.ref(source), (source._version, source.data_ptr())
        else:
            self._source = None

    @property
    def num_bytes(self) -> int:
        return self.target.untyped_storage().nbytes()


class InputBuffers:
    """The buffers of one owner by place in the call and kind of tensor; one lives as long as a graph that reads it.

    ``constants``: names of arguments and fields, all tensors under which are constant.
    """

    def __init__(self, constants: Collection[str] = ()) -> None:
        self._constants = frozenset(constants)
        self._buffers: weakref.WeakValueDictionary[Any, InputBuffer] = weakref.WeakValueDictionary()

    def build(self, arguments: Any) -> tuple[Any, list[InputBuffer]]:
        """``arguments`` with buffers in place of tensors, and the buffers in the order of ``map_tensors``."""
        buffers: list[InputBuffer] = []

        def buffer(path: Path, tensor: Tensor) -> Tensor:
            key = (path, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            found = self._buffers.get(key)
            if found is None:
                found = self._buffers[key] = InputBuffer(tensor, not self._constants.isdisjoint(path))
            buffers.append(found)
            return found.tensor

        return map_tensors(arguments, buffer), buffers

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self._buffers.values())


def fill(buffers: Sequence[InputBuffer], tensors: Sequence[Tensor]) -> None:
    """Copy what the buffers do not hold already, on the current stream."""
    missing = [pair for pair in zip(buffers, tensors, strict=True) if not pair[0].holds(pair[1])]
    if not missing:
        return
    # One launch for many tensors: keys and values of a text are hundreds.
    torch._foreach_copy_([buffer.target for buffer, _ in missing], [_once(tensor) for _, tensor in missing])
    for buffer, tensor in missing:
        buffer.remember(tensor)


def _once(tensor: Tensor) -> Tensor:
    """``tensor`` with its expanded dims cut to 1, so that no two elements share memory."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
