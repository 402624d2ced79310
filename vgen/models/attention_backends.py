"""Attention kernels by name: what each one can do, and how it takes the place of ``attend``.

Shapes: B batch, S query tokens, L key tokens, N heads, H head dim. All calls get [B, S, N, H] buffers seen as
[B, N, S, H] (``models/attention.py``) and return such a view again, so no kernel here copies a head.

``cudnn`` and ``flash`` call torch's operators themselves rather than SDPA inside ``sdpa_kernel``. That context manager
reads and sets five flags of the process twice around every call: 34 us of Python, and a pass of LTX-2 makes 288 calls;
the operator costs 4 us more than SDPA. A compiler and a graph capture see one operator instead of global state, and an
operator that cannot run raises, where a flag that somebody else set could send the call to another kernel.

All of them are for inference: none keeps what a backward pass needs.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from vgen.models.attention import Attend, sdpa


class AttentionError(ValueError):
    """An attention backend was asked for that cannot run here, or with a mask that its kernel does not take."""


@dataclass(frozen=True)
class Backend:
    """What a kernel needs. ``generations``: major compute capabilities of the GPUs that have it."""

    generations: range
    max_head_dim: int
    package: str | None = None
    install: str = ""


BACKENDS: Mapping[str, Backend | None] = MappingProxyType(
    {
        "sdpa": None,  # torch's own choice, which always finds one
        "cudnn": Backend(generations=range(8, 13), max_head_dim=256),
        "flash": Backend(generations=range(8, 13), max_head_dim=256),
        "fa3": Backend(
            generations=range(9, 10),
            max_head_dim=256,
            package="flash_attn_interface",
            install="build the hopper/ folder of github.com/Dao-AILab/flash-attention",
        ),
        "fa4": Backend(
            generations=range(8, 13),
            max_head_dim=128,
            package="flash_attn.cute",
            install="pip install flash-attn-4",
        ),
    }
)
"""The values of ``model.attention``. Packages are named as in torch's own registry (``torch/nn/attention/_fa?.py``)."""

HEAD_DIM_UNIT = 8
"""All of these kernels read a head in groups of eight values."""

MASKED_SCORE = -65504.0
"""Added to a masked score; the lowest fp16 number, as torch adds it for cuDNN, which has no minus infinity."""


def apply_attention(module: nn.Module, name: str) -> None:
    """Make all that attends inside ``module`` do so by the backend ``name``, in place; ``sdpa`` changes nothing.

    Raises:
        AttentionError: no such backend, or its package cannot be imported.
    """
    if _backend(name) is None:
        return
    attend = build_attend(name)
    for part in module.modules():
        if hasattr(part, "attend"):
            part.attend = attend  # type: ignore[assignment]


def build_attend(name: str) -> Attend:
    """The callable of backend ``name``.

    Raises:
        AttentionError: no such backend, or its package cannot be imported.
    """
    backend = _backend(name)
    if backend is None:
        return sdpa
    if backend.package is not None:
        return _packaged(name, _import(name, backend).flash_attn_func)
    return {"cudnn": attend_cudnn, "flash": attend_flash}[name]


def attend_cudnn(q_BNSH: Tensor, k_BNLH: Tensor, v_BNLH: Tensor, mask: Tensor | None = None) -> Tensor:
    """``sdpa`` by cuDNN's kernel and no other, masks included. Returns [B, N, S, H]."""
    bias = mask
    if mask is not None and mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=q_BNSH.dtype).masked_fill_(~mask, MASKED_SCORE)
    # False: no log-sum-exp, which only a backward pass reads.
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q_BNSH, k_BNLH, v_BNLH, bias, False)[0]
    return out


def attend_flash(q_BNSH: Tensor, k_BNLH: Tensor, v_BNLH: Tensor, mask: Tensor | None = None) -> Tensor:
    """``sdpa`` by the FlashAttention-2 kernel inside torch and no other. Returns [B, N, S, H].

    Raises:
        AttentionError: there is a mask.
    """
    _refuse_mask("flash", mask)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention.default(q_BNSH, k_BNLH, v_BNLH)[0]
    return out


def _packaged(name: str, kernel: Callable[..., Any]) -> Attend:
    """``kernel``: ``flash_attn_func`` of FlashAttention-3 or -4, which take [B, S, N, H]."""

    def attend(q_BNSH: Tensor, k_BNLH: Tensor, v_BNLH: Tensor, mask: Tensor | None = None) -> Tensor:
        _refuse_mask(name, mask)
        result = kernel(q_BNSH.transpose(1, 2), k_BNLH.transpose(1, 2), v_BNLH.transpose(1, 2))
        # Releases differ in whether the log-sum-exp comes along.
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2)

    return attend


def _refuse_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None:
        raise AttentionError(
            f"model.attention={name} got a mask of {tuple(mask.shape)}, and its kernel takes none: "
            f"use model.attention=cudnn or sdpa where tokens are masked"
        )


def require_backend(name: str, device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> None:
    """Refuse a backend that cannot run heads of ``head_dims`` in ``dtype`` on ``device``; call it before weights load.

    Raises:
        AttentionError: no such backend; its package, GPU or dtype is missing; a head dim that it does not take.
    """
    backend, head_dims = _backend(name), tuple(head_dims)
    if backend is None:
        return
    if device.type != "cuda":
        raise AttentionError(
            f"model.attention={name} runs on CUDA devices and this run is on {device.type}: "
            f"use device=cuda or model.attention=sdpa"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise AttentionError(
            f"model.attention={name} computes in 16 bits and the model is in {str(dtype).removeprefix('torch.')}: "
            f"use quant=bf16 or model.attention=sdpa"
        )
    for head_dim in head_dims:
        if head_dim % HEAD_DIM_UNIT or head_dim > backend.max_head_dim:
            raise AttentionError(
                f"model.attention={name} takes heads of a multiple of {HEAD_DIM_UNIT} up to {backend.max_head_dim} "
                f"values and this model has heads of {head_dim}: use model.attention=sdpa"
            )
    _require_gpu(name, backend, device)
    if backend.package is not None:
        _import(name, backend)
        return
    for head_dim in head_dims:
        _require_torch_allows(name, device, dtype, head_dim)


def _backend(name: str) -> Backend | None:
    if name not in BACKENDS:
        raise AttentionError(f"model.attention={name} is not a backend; use one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def _require_gpu(name: str, backend: Backend, device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major not in backend.generations:
        first, last = backend.generations[0], backend.generations[-1]
        wanted = f"{first}.x" if first == last else f"{first}.x to {last}.x"
        raise AttentionError(
            f"model.attention={name} is written for GPUs of compute capability {wanted} and this one has "
            f"{major}.{minor}: use model.attention=sdpa"
        )


def _import(name: str, backend: Backend) -> Any:
    assert backend.package is not None
    try:
        return importlib.import_module(backend.package)
    except Exception as error:  # a package built for another torch or CUDA fails in ways of its own
        raise AttentionError(
            f"model.attention={name} needs the package {backend.package}, which cannot be imported ({error}): "
            f"{backend.install}, or use model.attention=sdpa"
        ) from error


def _require_torch_allows(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Ask torch's own rules, which know versions of cuDNN and what this build of torch has."""
    q = _heads(1, 1, 128, head_dim, device, dtype)
    params = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    allows = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
    }
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        allowed = allows[name](params, debug=True)
    if not allowed:
        reason = "; ".join(str(warning.message).partition(" (Triggered")[0] for warning in reasons)
        raise AttentionError(
            f"model.attention={name} is refused by torch {torch.__version__} for heads of {head_dim} ({reason}): "
            f"use model.attention=sdpa"
        )


_SDPA_KERNELS = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.OVERRIDEABLE: "overrideable",
}


def what_ran(
    name: str, device: torch.device, dtype: torch.dtype, *, num_heads: int, head_dim: int, tokens: int, batch: int = 1
) -> str:
    """The backend as a record shows it: ``cudnn``, or ``sdpa:cudnn`` where torch chooses for unmasked self-attention.

    Allocates one [B, N, S, H] tensor for the answer, which depends on all sizes.

    Raises:
        AttentionError: no such backend.
    """
    if _backend(name) is not None:
        return name
    q = _heads(batch, num_heads, tokens, head_dim, device, dtype)
    return f"sdpa:{_SDPA_KERNELS[SDPBackend(torch._fused_sdp_choice(q, q, q))]}"


def _heads(batch: int, num_heads: int, tokens: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[B, N, S, H], empty, in the layout of the attention modules."""
    return torch.empty(batch, tokens, num_heads, head_dim, device=device, dtype=dtype).transpose(1, 2)
