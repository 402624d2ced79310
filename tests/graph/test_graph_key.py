"""What a key tells apart, what it does not, and what it refuses."""

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vgen.graph.key import digest, graph_key, key_and_tensors
from vgen.graph.tree import map_tensors


class Colour(enum.Enum):
    RED = 1
    BLUE = 1.5


class Size(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Inner:
    value: Any
    name: str = "inner"


@dataclass(frozen=True)
class Other:
    value: Any
    name: str = "inner"


@dataclass(frozen=True, eq=False)
class Outer:
    inner: Any
    flag: bool = True


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def key(value: Any) -> Any:
    return graph_key((), {"value": value})


a, b = zeros(2), zeros(3)

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "shape": (zeros(2, 3), zeros(3, 2)),
    "rank": (zeros(1), zeros()),
    "dtype": (zeros(2), zeros(2, dtype=torch.bfloat16)),
    "stride": (zeros(2, 3), zeros(3, 2).t()),
    "expanded": (zeros(2, 3), zeros(2, 1).expand(2, 3)),
    "device": (zeros(2), torch.zeros(2, device="meta")),
    "number": (1, 2),
    "bool and int": (1, True),
    "int and float": (1, 1.0),
    "sign of zero": (0.0, -0.0),
    "string": ("all", "none"),
    "string and bytes": ("a", b"a"),
    "None and False": (None, False),
    "None and a tensor": (None, a),
    "None and nothing": (None, ()),
    "enum": (Colour.RED, Colour.BLUE),
    "enum and its value": (Size.ONE, 1),
    "dtype given": (torch.float32, torch.bfloat16),
    "list and tuple": ([a, b], (a, b)),
    "nesting": ([[a, b]], [[a], [b]]),
    "nesting of numbers": (((1, 2),), ((1,), (2,))),
    "where None is": ((None, 1), (1, None)),
    "named tuple and tuple": (Pair(1, 2), (1, 2)),
    "field of a dataclass inside another": (Outer(Inner(1)), Outer(Inner(2))),
    "flag of a dataclass": (Outer(a), Outer(a, flag=False)),
    "type of a dataclass": (Inner(1), Other(1)),
    "tensor in a dataclass": (Outer(Inner(a)), Outer(Inner(b))),
    "name in a mapping": ({"x": a}, {"y": a}),
    "order of a mapping": ({"x": a, "y": a}, {"y": a, "x": a}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_tells_apart(name: str) -> None:
    one, other = map(key, DIFFERENT[name])

    assert one != other
    assert digest(one) != digest(other) or name == "device"


EQUAL: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.randn(2, 3),
    "parameter": lambda: Inner(torch.nn.Parameter(torch.randn(2))),
    "nested dataclass": lambda: Outer(Inner((torch.randn(2), None, 1.5, Colour.RED))),
    "not a number": lambda: float("nan"),
    "mappings": lambda: [{"x": torch.randn(1)}, MappingProxyType({"y": Pair(1, torch.randn(2))})],
}


@pytest.mark.parametrize("name", EQUAL)
def test_values_of_tensors_do_not_count(name: str) -> None:
    one, other = key(EQUAL[name]()), key(EQUAL[name]())

    assert one == other
    assert hash(one) == hash(other)
    assert digest(one) == digest(other)


def test_a_parameter_is_a_tensor_to_a_graph() -> None:
    assert key(torch.nn.Parameter(zeros(2))) == key(zeros(2))


def test_where_an_argument_is() -> None:
    assert graph_key((a, b), {}) != graph_key((b, a), {})
    assert graph_key((a,), {"x": b}) != graph_key((a, b), {})
    assert graph_key((), {"x": 1}) != graph_key((), {"y": 1})


def test_state_is_part_of_the_key() -> None:
    states = [(), ("bf16", None), ("nvfp4", None), ("nvfp4", "distilled")]

    assert len({graph_key((a,), {}, state) for state in states}) == len(states)


@dataclass
class Held:
    """Not to be built by its fields alone."""

    tensor: Tensor
    derived: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.derived = self.tensor + 1


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (print, "builtin_function_or_method"),
        ({1, 2}, "set"),
        (object(), "object"),
        (torch.nn.Linear(1, 1), "Linear"),
        (Inner, "type"),
        (a.to_sparse(), "layout torch.sparse_coo"),
    ],
)
def test_refuses_what_it_cannot_compare(value: Any, what: str) -> None:
    with pytest.raises(TypeError, match=rf"argument 'value' of a captured call holds a .*{what}"):
        key([Outer(Inner((None, value)))])
    with pytest.raises(TypeError, match="the state of a captured call holds"):
        graph_key((), {}, value)


def test_the_key_of_another_gpu_has_the_same_digest() -> None:
    keys = [((torch.device("cuda", index), Tensor), "x") for index in range(2)]

    assert keys[0] != keys[1]
    assert digest(keys[0]) == digest(keys[1])
    assert digest(((torch.device("cpu"), Tensor), "x")) != digest(keys[0])


def tree() -> Any:
    mapping = OrderedDict(z=zeros(7), a=(1, Pair(zeros(8), "x")))
    return Outer([zeros(1), None, Held(zeros(2)), {"y": zeros(3)}, MappingProxyType({"m": zeros(9)}), mapping])


def test_both_walks_have_the_same_order() -> None:
    order: list[Tensor] = []
    value = tree()
    map_tensors(value, lambda _, tensor: order.append(tensor))

    _, tensors = key_and_tensors((), {"value": value})

    assert [tensor.numel() for tensor in order] == [1, 2, 2, 3, 9, 7, 8]
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in order]


def test_mapping_keeps_the_containers() -> None:
    value = tree()
    paths: list[Any] = []

    mapped = map_tensors(value, lambda path, tensor: paths.append(path) or tensor + 1)

    assert key(mapped) == key(value)
    assert paths[:2] == [("inner", 0), ("inner", 2, "tensor")]
    assert paths[-1] == ("inner", 5, "a", 1, 0)
    assert mapped.inner[2].derived.tolist() == [2, 2]
    assert value.inner[2].derived.tolist() == [1, 1]


def test_what_has_no_tensors_is_not_copied() -> None:
    value = Outer(Inner((1, "x")))

    assert map_tensors(value, lambda _, tensor: tensor + 1) is value
