"""Weights that travel: the same bits, strides and objects after any number of visits, and away when nobody uses them.

``active=True`` makes modules travel between host copies and "device" copies that are both in CPU memory.
"""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from vgen.residency import PREFETCH_MARGIN, Residency, ResidencyError, _Visitor

CPU = torch.device("cpu")


class Part(nn.Module):
    """Everything that makes moving weights hard, in one module."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.linear = nn.Linear(5, 7)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.linear.weight
        self.conv = nn.Conv3d(3, 4, 3).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.gate = nn.Parameter(randn(3, 3).bfloat16())
        fused = randn(4, 6)
        self.rows = nn.Parameter(fused[1:3])  # views of one storage, one of them transposed
        self.columns = nn.Parameter(fused.t()[2:])
        self.register_buffer("statistics", randn(4).double())
        self.register_buffer("frequencies", randn(6), persistent=False)
        self.register_buffer("scale", torch.tensor(3.5), persistent=False)
        self.register_buffer("positions", torch.arange(4).expand(3, 4), persistent=False)  # stride 0
        self.register_buffer("nothing", torch.empty(0))
        self.alias = self.frequencies  # a plain attribute that must follow, as in Gemma's rotary embedding
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.tied(x)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))


def snapshot(module: nn.Module) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    return {name: (tensor.clone(), tensor.stride()) for name, tensor in tensors(module).items()}


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors(module).items() if tensor.numel()}


def assert_unchanged(module: nn.Module, before: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for name, tensor in tensors(module).items():
        assert torch.equal(tensor, before[name][0].to(tensor.device)), name
        assert tensor.stride() == before[name][1], name
        assert tensor.dtype == before[name][0].dtype, name


def moving(**visiting: nn.Module) -> Residency:
    return Residency(CPU, {}, visiting, active=True)


def test_bits_and_strides_survive_every_visit() -> None:
    part = Part()
    before, objects = snapshot(part), {name: id(tensor) for name, tensor in tensors(part).items()}
    residency = moving(part=part)
    assert_unchanged(part, before)
    for _ in range(3):
        with residency.use("part"):
            assert_unchanged(part, before)
            assert part.conv.weight.is_contiguous(memory_format=torch.channels_last_3d)
        assert_unchanged(part, before)
    assert {name: id(tensor) for name, tensor in tensors(part).items()} == objects


def test_weights_are_elsewhere_during_a_visit_and_home_after_it() -> None:
    part = Part()
    loaded = addresses(part)
    residency = moving(part=part)
    home = addresses(part)
    assert not set(home.values()) & set(loaded.values())
    with residency.use("part"):
        visiting = addresses(part)
        assert not set(visiting.values()) & set(home.values())
    assert addresses(part) == home


def test_tied_weights_views_and_aliases_stay_together() -> None:
    part = Part()
    residency = moving(part=part)
    for _ in range(2):
        with residency.use("part"):
            assert part.tied.weight is part.linear.weight
            assert part.alias is part.frequencies
            assert part.rows.untyped_storage().data_ptr() == part.columns.untyped_storage().data_ptr()
            torch.testing.assert_close(part.rows[:, 2:], part.columns[:, 1:3].t(), rtol=0, atol=0)


def test_one_copy_per_storage() -> None:
    part = Part()
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors(part).values() if tensor.numel()}
    residency = moving(part=part)
    assert len([s for s in residency._visitors["part"].storages if s.numel()]) == len(storages)


def test_the_copies_on_the_device_are_freed_on_leaving() -> None:
    part = Part()
    residency = moving(part=part)
    with residency.use("part"):
        freed: list[int] = []
        storage = part.gate.untyped_storage()
        weakref.finalize(storage, freed.append, storage.data_ptr())
        del storage
    gc.collect()
    assert len(freed) == 1 and part.gate.data_ptr() not in freed


def test_what_a_visit_writes_is_lost() -> None:
    part = Part()
    before = snapshot(part)
    residency = moving(part=part)
    with residency.use("part"):
        part.linear.weight.zero_()
        part.statistics.zero_()
    assert_unchanged(part, before)
    with residency.use("part"):
        assert_unchanged(part, before)


def test_uses_nest_and_overlap() -> None:
    one, two = Part(1), Part(2)
    residency = moving(one=one, two=two)
    home = addresses(one), addresses(two)
    first, second = residency.use("one", "two"), residency.use("two", "one", "one")
    first.__enter__()
    visiting = addresses(one), addresses(two)
    second.__enter__()
    assert (addresses(one), addresses(two)) == visiting  # no second copy
    first.__exit__(None, None, None)
    assert (addresses(one), addresses(two)) == visiting  # somebody still uses them
    second.__exit__(None, None, None)
    assert (addresses(one), addresses(two)) == home


def test_only_the_named_modules_visit() -> None:
    one, two = Part(1), Part(2)
    residency = moving(one=one, two=two)
    home = addresses(two)
    with residency.use("one"):
        assert addresses(two) == home


def test_an_error_inside_sends_them_home() -> None:
    part = Part()
    residency = moving(part=part)
    home = addresses(part)
    with pytest.raises(RuntimeError, match="inside"), residency.use("part"):
        raise RuntimeError("inside")
    assert addresses(part) == home


def test_a_copy_that_fails_leaves_the_others_home(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Part(1), Part(2)
    residency = moving(one=one, two=two)
    home = addresses(one), addresses(two)

    plain, full = _Visitor.move_to, residency._visitors["two"]

    def move_to(visitor: _Visitor, device: torch.device) -> None:
        if visitor is full:
            raise torch.OutOfMemoryError("full")
        plain(visitor, device)

    monkeypatch.setattr(_Visitor, "move_to", move_to)
    with pytest.raises(torch.OutOfMemoryError), residency.use("one", "two"):
        pass
    assert (addresses(one), addresses(two)) == home
    assert not any(residency._users.values())


def test_residents_stay() -> None:
    part, visitor = Part(1), Part(2)
    loaded = addresses(part)
    residency = Residency(CPU, {"part": part}, {"visitor": visitor}, active=True)
    with residency.use("part", "visitor"):
        assert addresses(part) == loaded
    assert addresses(part) == loaded


def test_on_the_host_itself_nothing_moves() -> None:
    part = Part()
    loaded = addresses(part)
    residency = Residency(CPU, {}, {"part": part})
    assert addresses(part) == loaded
    with residency.use("part"):
        assert addresses(part) == loaded


def test_parking_one_after_the_other() -> None:
    residency = Residency(CPU, {}, {}, active=True)
    one, two = Part(1), Part(2)
    loaded = addresses(one), addresses(two)
    residency.keep("one", one)
    residency.park("two", two)
    assert addresses(one) == loaded[0]
    assert not set(addresses(two).values()) & set(loaded[1].values())
    with residency.use("one", "two"):
        two(torch.ones(5))


def test_unknown_and_repeated_names_are_refused() -> None:
    residency = moving(part=Part())
    with pytest.raises(ResidencyError, match="'transformer' is no module of this run; known are part"):
        residency.use("part", "transformer").__enter__()
    assert not residency._users["part"]
    with pytest.raises(ResidencyError, match="'part' is placed already"):
        residency.park("part", Part())


@pytest.mark.parametrize("kept", [True, False])
def test_modules_that_share_weights_cannot_part(kept: bool) -> None:
    one, two = Part(1), Part(2)
    two.linear.weight = one.linear.weight
    residency = moving(one=one)
    with pytest.raises(ResidencyError, match="'two' and 'one' share weights"):
        (residency.keep if kept else residency.park)("two", two)
    residents = Residency(CPU, {"one": one, "two": two}, {}, active=True)
    with pytest.raises(ResidencyError, match="'three' and 'one' share weights"):
        residents.park("three", one)


@pytest.mark.gpu
def test_visits_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    part = Part().to(cuda)  # which packs strided views, so the strides to keep are those after it
    before = snapshot(part)
    expected = part(torch.ones(5, device=cuda))
    residency = Residency(cuda, {}, {"part": part})
    assert all(tensor.is_cpu for tensor in tensors(part).values())
    assert all(tensor.is_pinned() for tensor in tensors(part).values() if tensor.numel())
    assert_unchanged(part, before)
    for _ in range(3):
        with residency.use("part"):
            assert all(tensor.is_cuda for tensor in tensors(part).values())
            assert_unchanged(part, before)
            torch.testing.assert_close(part(torch.ones(5, device=cuda)), expected, rtol=0, atol=0)
        with pytest.raises(RuntimeError):
            part(torch.ones(5, device=cuda))


@pytest.mark.gpu
def test_leaving_a_gpu_frees_it() -> None:
    cuda = torch.device("cuda")
    module = nn.Linear(4096, 4096, device=cuda, dtype=torch.bfloat16).requires_grad_(False)
    held = torch.cuda.memory_allocated()
    residency = Residency(cuda, {}, {"module": module})
    away = torch.cuda.memory_allocated()
    assert held - away >= 4096 * 4096 * 2
    with residency.use("module"):
        assert torch.cuda.memory_allocated() == held
    assert torch.cuda.memory_allocated() == away


def test_nothing_is_fetched_ahead_without_a_gpu() -> None:
    part = Part()
    residency = moving(part=part)
    before = addresses(part)
    assert not residency.prefetch("part")
    assert addresses(part) == before
    with pytest.raises(ResidencyError, match="'other' is no module"):
        residency.prefetch("other")


@pytest.mark.gpu
def test_what_is_fetched_ahead_is_what_a_visit_brings() -> None:
    cuda = torch.device("cuda")
    part = Part().to(cuda)
    before, expected = snapshot(part), part(torch.ones(5, device=cuda))
    residency = Residency(cuda, {}, {"part": part})
    away = torch.cuda.memory_allocated()
    for _ in range(3):
        assert residency.prefetch("part")
        assert not residency.prefetch("part")  # on its way
        with residency.use("part"):
            assert not residency.prefetch("part")  # there
            assert_unchanged(part, before)
            torch.testing.assert_close(part(torch.ones(5, device=cuda)), expected, rtol=0, atol=0)
        assert all(tensor.is_cpu for tensor in tensors(part).values())
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= away


@pytest.mark.gpu
def test_nothing_is_fetched_ahead_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part().to("cuda")
    residency = Residency(torch.device("cuda"), {}, {"part": part})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (PREFETCH_MARGIN, 2 * PREFETCH_MARGIN))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    assert not residency.prefetch("part")
    with residency.use("part"):
        assert all(tensor.is_cuda for tensor in tensors(part).values())
