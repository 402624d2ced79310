"""The attention module: its arithmetic in float64 by hand, its seam, its memory layout."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vgen.models.attention import Attention, rotate, sdpa

HEADS, HEAD_DIM = 3, 8


def build(width: int = 20, context_width: int = 14, gated: bool = False) -> Attention:
    module = Attention(width, context_width, HEADS, HEAD_DIM, norm_eps=1e-3, gated=gated).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module.requires_grad_(False)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_rope(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    angles = randn(1, HEADS, tokens, HEAD_DIM // 2, seed=seed)
    return angles.cos(), angles.sin()


def by_hand(
    module: Attention,
    x: Tensor,
    context: Tensor,
    turn_q: object = None,
    turn_k: object = None,
    keep: tuple[bool, ...] | None = None,
) -> Tensor:
    def normed(t: Tensor, weight: Tensor) -> Tensor:
        return t / (t.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    q = normed(x @ module.to_q.weight.T + module.to_q.bias, module.q_norm.weight)
    k = normed(context @ module.to_k.weight.T + module.to_k.bias, module.k_norm.weight)
    v = context @ module.to_v.weight.T + module.to_v.bias
    q, k, v = (t.view(*t.shape[:2], HEADS, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
    q = q if turn_q is None else rotate(q, *turn_q)  # type: ignore[misc]
    k = k if turn_k is None else rotate(k, *turn_k)  # type: ignore[misc]
    out = torch.softmax(q @ k.transpose(-1, -2) / HEAD_DIM**0.5, dim=-1) @ v
    if keep is not None:
        out = torch.stack([attended if kept else value for attended, value, kept in zip(out, v, keep, strict=True)])
    if module.to_gate_logits is not None:
        logits = x @ module.to_gate_logits.weight.T + module.to_gate_logits.bias
        out = out * (2 / (1 + torch.exp(-logits))).transpose(1, 2).unsqueeze(-1)
    out = out.transpose(1, 2).reshape(*x.shape[:2], -1)
    return out @ module.to_out[0].weight.T + module.to_out[0].bias


def test_cross_attention_by_hand() -> None:
    module, x, context = build(), randn(2, 5, 20), randn(2, 7, 14, seed=2)
    torch.testing.assert_close(module(x, context), by_hand(module, x, context), rtol=0, atol=1e-12)


def test_self_attention_turns_queries_and_keys_alike() -> None:
    module, x, rope = build(20, 20), randn(2, 5, 20), make_rope(5, seed=3)
    torch.testing.assert_close(module(x, rope=rope), by_hand(module, x, x, rope, rope), rtol=0, atol=1e-12)
    assert (module(x, rope=rope) - module(x)).abs().max() > 0.01


def test_keys_have_their_own_rope() -> None:
    module, x, context = build(), randn(2, 5, 20), randn(2, 7, 14, seed=2)
    rope, context_rope = make_rope(5, seed=3), make_rope(7, seed=4)
    torch.testing.assert_close(
        module(x, context, rope, context_rope), by_hand(module, x, context, rope, context_rope), rtol=0, atol=1e-12
    )


def test_gates_follow_the_queries_input_per_head() -> None:
    module, x, context = build(gated=True), randn(2, 5, 20), randn(2, 7, 14, seed=2)
    torch.testing.assert_close(module(x, context), by_hand(module, x, context), rtol=0, atol=1e-12)
    assert module.to_gate_logits is not None
    module.to_gate_logits.weight.zero_()
    module.to_gate_logits.bias.zero_()
    open_gates = module(x, context)
    module.to_gate_logits = None
    torch.testing.assert_close(open_gates, module(x, context), rtol=0, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True])
def test_a_bypass_keeps_value_gate_and_output_projection(gated: bool) -> None:
    module, x, rope = build(20, 20, gated), randn(3, 5, 20), make_rope(5, seed=3)
    for keep in [(False, False, False), (True, False, True), (True, True, True)]:
        expected = by_hand(module, x, x, rope, rope, keep)
        mask = torch.tensor(keep)[:, None, None]
        torch.testing.assert_close(module(x, rope=rope, keep=mask), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        module(x, rope=rope, keep=False), by_hand(module, x, x, rope, rope, (False,) * 3), rtol=0, atol=1e-12
    )
    assert torch.equal(module(x, rope=rope, keep=True), module(x, rope=rope))


def test_a_full_bypass_computes_neither_queries_nor_keys_nor_attention() -> None:
    module, x = build(20, 20, gated=True), randn(2, 5, 20)
    ran: list[str] = []
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_, name=name: ran.append(name))

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        raise AssertionError("attention ran")

    module.attend = attend
    module(x, rope=make_rope(5, seed=3), keep=False)
    assert ran == ["to_v", "to_gate_logits", "to_out.0", ""]


def test_keys_and_values_can_be_made_before() -> None:
    module, x, context, rope = build(gated=True), randn(2, 5, 20), randn(2, 7, 14, seed=2), make_rope(7, seed=4)
    keys_values = module.keys_values(context)
    assert keys_values.keys.shape == keys_values.values.shape == (2, HEADS, 7, HEAD_DIM)
    assert torch.equal(module(x, keys_values), module(x, context))
    turned = module(x, keys_values, make_rope(5, seed=3), rope)
    assert torch.equal(turned, module(x, context, make_rope(5, seed=3), rope))
    # Turning makes new keys: those kept stay as they were.
    assert torch.equal(module(x, keys_values), module(x, context))


def test_names_and_shapes_are_those_of_the_checkpoint() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in build().state_dict().items()}
    assert shapes == {
        "to_q.weight": (24, 20),
        "to_q.bias": (24,),
        "to_k.weight": (24, 14),
        "to_k.bias": (24,),
        "to_v.weight": (24, 14),
        "to_v.bias": (24,),
        "to_out.0.weight": (20, 24),
        "to_out.0.bias": (20,),
        "q_norm.weight": (24,),
        "k_norm.weight": (24,),
    }
    gated = {name: tuple(tensor.shape) for name, tensor in build(gated=True).state_dict().items()}
    assert gated == {**shapes, "to_gate_logits.weight": (HEADS, 20), "to_gate_logits.bias": (HEADS,)}


def test_attend_is_an_attribute_that_others_replace() -> None:
    module, x, context = build(), randn(2, 5, 20), randn(2, 7, 14, seed=2)
    assert module.attend is sdpa
    calls: list[tuple[tuple[int, ...], ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        calls.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        assert mask is None
        return torch.zeros_like(q)

    module.attend = attend
    out = module(x, context)

    assert calls == [((2, HEADS, 5, HEAD_DIM), (2, HEADS, 7, HEAD_DIM), (2, HEADS, 7, HEAD_DIM))]
    torch.testing.assert_close(out, module.to_out[0].bias.expand_as(out), rtol=0, atol=0)


def test_mask_reaches_the_kernel_only_when_given(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, context = build(), randn(1, 5, 20), randn(1, 7, 14, seed=2)
    masks: list[Tensor | None] = []
    plain = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        masks.append(attn_mask)
        return plain(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    module(x, context)
    mask = torch.tensor([True] * 4 + [False] * 3)[None, None, None]
    masked = module(x, context, mask=mask)

    assert masks == [None, mask]
    torch.testing.assert_close(masked, by_hand(module, x, context[:, :4]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("with_rope", [False, True])
def test_heads_are_views_of_the_projections(with_rope: bool) -> None:
    # [B, S, N, H] buffers seen as [B, N, S, H]: the layout that flash and cuDNN kernels read and write without a copy.
    module, x = build(20, 20), randn(2, 5, 20)
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        seen.extend((q, k, v))
        return q

    module.attend = attend
    inputs: list[Tensor] = []
    module.to_out[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    module(x, rope=make_rope(5, seed=3) if with_rope else None)

    assert all(tensor.transpose(1, 2).is_contiguous() for tensor in seen)
    assert inputs[0].data_ptr() == seen[0].data_ptr()
