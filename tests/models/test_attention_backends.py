"""Attention backends: what is refused in words, what is replaced, and on a GPU each kernel against plain attention."""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vgen.models import attention_backends
from vgen.models.attention import Attention, sdpa
from vgen.models.attention_backends import (
    BACKENDS,
    AttentionError,
    apply_attention,
    attend_cudnn,
    attend_flash,
    build_attend,
    require_backend,
    what_ran,
)

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
NAMES = ("cudnn", "flash", "fa3", "fa4")
PACKAGES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Attention(16, 16, 2, 8, norm_eps=1e-6)
        self.layers = nn.ModuleList([nn.ModuleDict({"inner": Attention(16, 16, 2, 8, norm_eps=1e-6)}), nn.Linear(2, 2)])


def attentions(model: nn.Module) -> list[Attention]:
    return [part for part in model.modules() if isinstance(part, Attention)]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Puts a ``flash_attn_func`` of one's own where ``fa3`` or ``fa4`` look for theirs."""

    def install(name: str, kernel: Callable[..., Any]) -> None:
        if "." in PACKAGES[name]:
            monkeypatch.setitem(sys.modules, PACKAGES[name].partition(".")[0], types.ModuleType("parent"))
        module = types.ModuleType(PACKAGES[name])
        module.flash_attn_func = kernel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, PACKAGES[name], module)

    return install


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU of compute capability 9.0 for which torch allows everything."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(attention_backends, "_require_torch_allows", lambda *args: None)
    yield monkeypatch


def test_sdpa_leaves_every_module_as_it_is() -> None:
    model = Model()
    before = [dict(part.__dict__) for part in attentions(model)]
    apply_attention(model, "sdpa")
    assert [dict(part.__dict__) for part in attentions(model)] == before
    assert all(part.attend is sdpa for part in attentions(model))
    require_backend("sdpa", CPU, torch.float32, [7])


@pytest.mark.parametrize("name, attend", [("cudnn", attend_cudnn), ("flash", attend_flash)])
def test_every_attention_inside_gets_the_kernel(name: str, attend: object) -> None:
    model = Model()
    apply_attention(model, name)
    assert len(attentions(model)) == 2
    assert all(part.attend is attend for part in attentions(model))


def test_an_attention_module_itself_gets_the_kernel() -> None:
    module = Attention(16, 16, 2, 8, norm_eps=1e-6)
    apply_attention(module, "cudnn")
    assert module.attend is attend_cudnn


@pytest.mark.parametrize("call", [apply_attention, lambda _, name: build_attend(name)])
def test_unknown_backend_is_named(call: Callable[[nn.Module, str], None]) -> None:
    with pytest.raises(AttentionError, match="attention=xformers is not a backend; use one of sdpa, cudnn, flash, fa3"):
        call(Model(), "xformers")
    with pytest.raises(AttentionError, match="xformers"):
        require_backend("xformers", CPU, BF16, [128])
    with pytest.raises(AttentionError, match="xformers"):
        what_ran("xformers", CPU, BF16, num_heads=1, head_dim=8, tokens=4)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_it_is_refused(name: str) -> None:
    with pytest.raises(AttentionError, match=f"attention={name} runs on CUDA devices and this run is on cpu: use dev"):
        require_backend(name, CPU, BF16, [128, 64])


@pytest.mark.parametrize("name", NAMES)
def test_fp32_is_refused(name: str, hopper: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttentionError, match=f"attention={name} computes in 16 bits and the model is in float32"):
        require_backend(name, CUDA, torch.float32, [128, 64])


@pytest.mark.parametrize("name, head_dim", [("cudnn", 60), ("flash", 264), ("fa3", 264), ("fa4", 136), ("fa4", 12)])
def test_head_dims_are_checked_all(name: str, head_dim: int, hopper: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttentionError, match=f"takes heads of a multiple of 8 up to .* has heads of {head_dim}"):
        require_backend(name, CUDA, BF16, (dim for dim in (64, head_dim)))


@pytest.mark.parametrize(
    "name, capability", [("cudnn", (7, 5)), ("flash", (7, 0)), ("fa3", (8, 9)), ("fa3", (10, 0)), ("fa4", (7, 5))]
)
def test_gpu_of_another_generation_is_refused(
    name: str, capability: tuple[int, int], hopper: pytest.MonkeyPatch
) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with pytest.raises(AttentionError, match=f"this one has {capability[0]}.{capability[1]}: use model.attention=sdpa"):
        require_backend(name, CUDA, BF16, [128, 64])


@pytest.mark.parametrize("name", NAMES)
def test_what_all_rules_allow_passes(
    name: str, hopper: pytest.MonkeyPatch, package: Callable[[str, Callable[..., Any]], None]
) -> None:
    if name in PACKAGES:
        package(name, lambda *_: None)
    require_backend(name, CUDA, BF16, [128, 64])
    require_backend(name, CUDA, torch.float16, [8])


def test_torch_is_asked_about_every_head_dim(hopper: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    hopper.setattr(attention_backends, "_require_torch_allows", lambda name, device, dtype, dim: asked.append(dim))
    require_backend("cudnn", CUDA, BF16, (dim for dim in (128, 64)))
    assert asked == [128, 64]


@pytest.mark.parametrize("failure", [ImportError("No module named x"), OSError("libcudart.so.11: cannot open")])
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_package_that_does_not_import_is_said(name: str, failure: Exception, hopper: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        assert module == PACKAGES[name]
        raise failure

    hopper.setattr(attention_backends.importlib, "import_module", fail)
    for call in (
        lambda: require_backend(name, CUDA, BF16, [128]),
        lambda: apply_attention(Model(), name),
    ):
        with pytest.raises(
            AttentionError, match=rf"needs the package {PACKAGES[name]}, .*\({failure}\).*attention=sdpa"
        ):
            call()


def test_a_refusal_of_torch_carries_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a machine without CUDA torch's own rules refuse, and say nothing or warn; either way it is an error here.
    import warnings

    def refuse(params: object, debug: bool) -> bool:
        warnings.warn("cuDNN version is too old. (Triggered internally at x.cpp:1.)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", refuse)
    heads = attention_backends._heads
    monkeypatch.setattr(attention_backends, "_heads", lambda b, n, s, h, device, dtype: heads(b, n, s, h, CPU, dtype))
    with pytest.raises(
        AttentionError, match=r"cudnn is refused by torch .* heads of 128 \(cuDNN version is too old.\)"
    ):
        require_backend("cudnn", CUDA, BF16, [128])


@pytest.mark.parametrize("name", ["flash", "fa3", "fa4"])
def test_a_mask_is_refused_where_the_kernel_has_none(
    name: str, package: Callable[[str, Callable[..., Any]], None]
) -> None:
    if name in PACKAGES:
        package(name, lambda q, k, v: q)
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(
        AttentionError, match=rf"attention={name} got a mask of \(1, 1, 5, 5\).*use model.attention=cudnn"
    ):
        build_attend(name)(q, q, q, torch.ones(1, 1, 5, 5, dtype=torch.bool))


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_packages_get_their_own_layout(
    name: str, with_lse: bool, package: Callable[[str, Callable[..., Any]], None]
) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Any:
        assert q.shape == (2, 5, 3, 8) and k.shape == v.shape == (2, 7, 3, 8)
        assert q.is_contiguous() and k.is_contiguous()
        out = sdpa(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).contiguous()
        return (out, None) if with_lse else out

    package(name, kernel)
    q, k, v = (torch.randn(2, tokens, 3, 8).transpose(1, 2) for tokens in (5, 7, 7))
    out = build_attend(name)(q, k, v, None)
    torch.testing.assert_close(out, sdpa(q, k, v), rtol=0, atol=1e-6)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("attend", [attend_cudnn, attend_flash])
def test_a_kernel_never_runs_as_another(attend: Callable[..., Tensor]) -> None:
    # These operators exist for CUDA only: on CPU tensors they raise instead of computing something else.
    q = torch.zeros(1, 2, 5, 8, dtype=BF16)
    with pytest.raises(NotImplementedError):
        attend(q, q, q)


def test_what_ran_names_torchs_choice() -> None:
    choice = what_ran("sdpa", CPU, torch.float32, num_heads=2, head_dim=8, tokens=16)
    assert choice == "sdpa:flash"  # the CPU's fused kernel has that name too
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert what_ran("sdpa", CPU, torch.float32, num_heads=2, head_dim=8, tokens=16) == "sdpa:math"


@pytest.mark.parametrize("name", NAMES)
def test_what_ran_is_the_name_where_there_is_no_choice(name: str) -> None:
    assert what_ran(name, CUDA, BF16, num_heads=32, head_dim=128, tokens=15360) == name


def test_what_ran_asks_for_the_shape_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def choose(q: Tensor, k: Tensor, v: Tensor) -> int:
        seen.append(q)
        return 3

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    assert what_ran("sdpa", CPU, BF16, num_heads=3, head_dim=8, tokens=5, batch=2) == "sdpa:cudnn"
    assert seen[0].shape == (2, 3, 5, 8) and seen[0].dtype == BF16
    assert seen[0].transpose(1, 2).is_contiguous()


def usable(name: str) -> bool:
    try:
        require_backend(name, CUDA, BF16, [128, 64])
    except AttentionError:
        return False
    return True


def heads(batch: int, num_heads: int, tokens: int, head_dim: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, tokens, num_heads, head_dim)
    return torch.randn(shape, generator=generator, device="cuda", dtype=BF16).transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v.double()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [(1024, 1024), (126, 1000), (1000, 126), (77, 77)])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_against_plain_attention(name: str, tokens: tuple[int, int], head_dim: int) -> None:
    if not usable(name):
        pytest.skip(f"{name} cannot run on this machine")
    q = heads(2, 4, tokens[0], head_dim, seed=0)
    k, v = (heads(2, 4, tokens[1], head_dim, seed=seed) for seed in (1, 2))
    with torch.no_grad():
        out, expected = build_attend(name)(q, k, v, None), plain(q, k, v)
    # One rounding of the probabilities and one of the result, each at most 2^-8 of the largest value.
    assert (out.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("boolean", [True, False])
def test_cudnn_with_a_mask(boolean: bool) -> None:
    if not usable("cudnn"):
        pytest.skip("cudnn cannot run on this machine")
    q, k, v = (heads(2, 4, 128, 64, seed=seed) for seed in range(3))
    kept = torch.ones(2, 1, 1, 128, dtype=torch.bool, device="cuda")
    kept[0, ..., 100:] = kept[1, ..., :9] = False
    mask = kept if boolean else torch.zeros(2, 1, 1, 128, device="cuda", dtype=BF16).masked_fill(~kept, float("-inf"))
    with torch.no_grad():
        out, expected = attend_cudnn(q, k, v, mask), plain(q, k, v, kept)
    assert (out.double() - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch 2.11's own, when its compiler is imported
@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_kernel_compiles_and_captures(name: str) -> None:
    if not usable(name):
        pytest.skip(f"{name} cannot run on this machine")
    attend = build_attend(name)
    q, k, v = (heads(1, 4, 256, 64, seed=seed) for seed in range(3))
    with torch.no_grad():
        expected = attend(q, k, v, None)
        torch.testing.assert_close(torch.compile(attend, fullgraph=True)(q, k, v, None), expected, rtol=0, atol=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend(q, k, v, None)
        graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_torchs_choice_on_this_gpu_is_a_fused_kernel() -> None:
    choice = what_ran("sdpa", CUDA, BF16, num_heads=32, head_dim=128, tokens=1024)
    assert choice in ("sdpa:cudnn", "sdpa:flash")
    assert what_ran("sdpa", CUDA, torch.float64, num_heads=2, head_dim=8, tokens=16) == "sdpa:math"


def test_every_backend_is_a_choice_of_the_configuration() -> None:
    from typing import get_args, get_type_hints

    from vgen.config import ModelConfig

    assert get_args(get_type_hints(ModelConfig)["attention"]) == tuple(BACKENDS)
