"""Input buffers: same strides, copied when and only when they have to be, shared and freed."""

import torch
from torch import Tensor

from vgen.graph.inputs import InputBuffer, InputBuffers, fill

LAYOUTS = {
    "dense": lambda: torch.randn(2, 3),
    "transposed": lambda: torch.randn(3, 2).t(),
    "part of another": lambda: torch.randn(2, 5)[:, 1:4],
    "one for all samples": lambda: torch.randn(1, 3).expand(2, 3),
    "scalar for all": lambda: torch.randn(()).expand(2, 3),
    "integers": lambda: torch.randint(9, (2, 3)),
}


def test_a_buffer_has_the_layout_of_its_source() -> None:
    for name, make in LAYOUTS.items():
        source, other = make(), make()
        buffer = InputBuffer(source, constant=False)
        fill([buffer], [source])
        assert torch.equal(buffer.tensor, source), name
        assert buffer.tensor.stride() == source.stride(), name
        fill([buffer], [other])
        assert torch.equal(buffer.tensor, other), name


def spoilt(buffer: InputBuffer, source: Tensor) -> bool:
    """Whether ``fill`` leaves the buffer alone."""
    buffer.target.fill_(-1)
    fill([buffer], [source])
    return bool((buffer.tensor == -1).all())


def test_a_constant_is_copied_once() -> None:
    source = torch.randn(3)
    buffer = InputBuffer(source, constant=True)
    assert not spoilt(buffer, source)
    assert spoilt(buffer, source)


def test_a_constant_is_copied_again_where_it_is_another_or_changed() -> None:
    source = torch.randn(3)
    buffer = InputBuffer(source, constant=True)
    fill([buffer], [source])
    assert not spoilt(buffer, source.clone())
    assert not spoilt(buffer, source)  # the other one came last
    source.add_(1)
    assert not spoilt(buffer, source)
    assert spoilt(buffer, source)
    source.data = torch.randn(3)
    assert not spoilt(buffer, source)


def test_another_tensor_at_the_same_address_is_another() -> None:
    """As the allocator hands out the memory of a text that is gone."""
    memory = bytearray(8)
    source = torch.frombuffer(memory, dtype=torch.uint8)
    buffer = InputBuffer(source, constant=True)
    fill([buffer], [source])
    address = source.data_ptr()
    del source
    memory[:] = b"the next"
    source = torch.frombuffer(memory, dtype=torch.uint8)
    assert source.data_ptr() == address
    fill([buffer], [source])
    assert torch.equal(buffer.tensor, source)


def test_what_is_not_constant_is_copied_always() -> None:
    source = torch.randn(3)
    buffer = InputBuffer(source, constant=False)
    fill([buffer], [source])
    assert not spoilt(buffer, source)


def test_tensors_of_inference_mode_are_copied_always() -> None:
    with torch.inference_mode():
        source = torch.randn(3)
    buffer = InputBuffer(source, constant=True)
    fill([buffer], [source])
    assert not spoilt(buffer, source)


def test_one_buffer_for_each_place_and_kind() -> None:
    buffers = InputBuffers(("context",))
    arguments = {"latents": torch.zeros(2), "stream": {"context": (torch.zeros(4), None)}, "shift": 1}

    replaced, first = buffers.build(arguments)
    _, second = buffers.build(arguments | {"more": torch.zeros(8)})
    _, third = buffers.build(arguments | {"latents": torch.zeros(2, dtype=torch.float64)})

    assert [buffer.constant for buffer in first] == [False, True]
    assert replaced["latents"] is first[0].tensor
    assert replaced["shift"] == 1 and replaced["stream"]["context"][1] is None
    assert second[:2] == first
    assert third[0] is not first[0] and third[1] is first[1]
    assert buffers.num_bytes == 8 + 16 + 32 + 16


def test_the_same_tensor_twice_has_two_buffers() -> None:
    """The next call may have two different ones of the same shape."""
    tensor = torch.zeros(2)

    _, built = InputBuffers().build((tensor, tensor))

    assert built[0].tensor.data_ptr() != built[1].tensor.data_ptr()


def test_a_buffer_goes_with_its_last_graph() -> None:
    buffers = InputBuffers()
    _, first = buffers.build((torch.zeros(2), torch.zeros(3)))
    _, second = buffers.build((torch.zeros(2),))
    del first
    assert buffers.num_bytes == 8
    del second
    assert buffers.num_bytes == 0
