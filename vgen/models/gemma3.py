"""Gemma-3 as LTX-2's text encoder: the text model of ``transformers``, its tokens and its hidden states.

Shapes: B prompts, L tokens, D hidden size.
Source: Lightricks/LTX-2 at 400fd31, ``text_encoders/gemma/{tokenizer,encoders/base_encoder}.py``; the modules are
those of huggingface/transformers (5.17 and 5.24 tested).
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vgen.models.tokenizer import TextEncoderError, TextTokenizer, Tokens, read_tokenizer, special_id

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENS = 1024
"""Tokens per prompt, padding included, that LTX-2 was trained with."""

GEMMA3_12B: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,  # five local layers, then a global one
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},  # global layers only
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
)
"""``text_config`` of google/gemma-3-12b-it-qat-q4_0-unquantized, for random weights."""

CHECKPOINT_PREFIXES = ("language_model.model.", "model.language_model.", "model.")
"""Starts of the text model's names in a checkpoint, by the transformers version that saved it; longest first."""

CHECKPOINT_IGNORED = (
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "lm_head.",
    "language_model.lm_head.",
)
"""Starts of names that a text encoder does not need."""

_BYTE_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
"""Ids 0 to 3, as Gemma's."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's part of a ``config.json`` of ``model_type`` gemma3 (nested) or gemma3_text.

    Raises:
        TextEncoderError: another model type.
    """
    kind = config.get("model_type")
    if kind == "gemma3" and isinstance(config.get("text_config"), Mapping):
        return copy.deepcopy(dict(config["text_config"]))
    if kind == "gemma3_text":
        return copy.deepcopy(dict(config))
    raise TextEncoderError(
        f"the text encoder's config.json has model_type={kind!r}; LTX-2 needs Gemma-3 (gemma3 or gemma3_text): "
        f"use google/gemma-3-12b-it-qat-q4_0-unquantized"
    )


def build_text_encoder(config: Mapping[str, Any]) -> nn.Module:
    """``Gemma3TextModel`` of a ``config.json``: parameters on the meta device, non-persistent buffers on the CPU.

    Raises:
        TextEncoderError: the config is of another model type.
    """
    from transformers.models.gemma3 import Gemma3TextConfig, Gemma3TextModel

    with torch.device("meta"):
        model: nn.Module = Gemma3TextModel(Gemma3TextConfig(**text_config(config)))
    restore_buffers(model, "cpu")
    return model.eval()


def restore_buffers(model: Any, device: torch.device | str) -> None:
    """Make the buffers that no checkpoint has, the rotary frequencies and the embedding's scale, in place.

    They are computed on the CPU whatever the device, so that all ranks use the same bits.
    """
    with torch.device("cpu"):
        model.rotary_emb = type(model.rotary_emb)(model.config).to(device)
        model.embed_tokens.embed_scale = torch.tensor(model.embed_tokens.scalar_embed_scale).to(device)


def hidden_sizes(model: Any) -> tuple[int, int]:
    """Channels of a hidden state, and the number of hidden states (layers + 1)."""
    return model.config.hidden_size, model.config.num_hidden_layers + 1


def encode_hidden_states(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
    """Hidden states [B, L, D] of all layers: the embeddings, then one per layer, the last after the final norm.

    ``input_ids`` and ``attention_mask`` (1 = valid) are int64 [B, L]. Positions count padding too, as in the official
    code. States at padded places are arbitrary.
    """
    output = model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False)
    states: tuple[Tensor, ...] = output.hidden_states
    return states


class Tokenizer(TextTokenizer):
    """Turns prompts into Gemma's tokens the way LTX-2 was trained: stripped, BOS first, no EOS, no chat template."""

    def __init__(self, backend: "tokenizers.Tokenizer", bos_id: int, pad_id: int) -> None:
        super().__init__(backend, pad_id)
        self.bos_id = bos_id

    def tokenize(self, prompts: Sequence[str], max_length: int = MAX_TOKENS) -> Tokens:
        """Tokens of each prompt, left-padded to ``max_length``.

        A prompt with more tokens loses its end; ``dropped`` says how many tokens, so that the caller can warn.
        """
        ids = torch.full((len(prompts), max_length), self.pad_id, dtype=torch.int64)
        mask = torch.zeros((len(prompts), max_length), dtype=torch.int64)
        dropped = []
        for row, prompt in enumerate(prompts):
            tokens = [self.bos_id, *self.backend.encode(prompt.strip(), add_special_tokens=False).ids]
            kept = tokens[:max_length]
            ids[row, max_length - len(kept) :] = torch.tensor(kept)
            mask[row, max_length - len(kept) :] = 1
            dropped.append(len(tokens) - len(kept))
        return Tokens(ids, mask, tuple(dropped))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of ``folder``: ``tokenizer.json``, and its special tokens by name from ``tokenizer_config.json``.

    Raises:
        TextEncoderError: a file is missing or unreadable, or there is no beginning-of-sequence token.
    """
    path = Path(folder) / "tokenizer.json"
    backend, names = read_tokenizer(path, "a Gemma-3 folder with tokenizer.json")
    bos_id = special_id(backend, names.get("bos_token", "<bos>"))
    if bos_id is None:
        raise TextEncoderError(
            f"{path} has no beginning-of-sequence token, with which every prompt starts; use Gemma-3's"
        )
    pad_id = special_id(backend, names.get("pad_token") or names.get("eos_token") or "<pad>")
    if pad_id is None:
        raise TextEncoderError(f"{path} has no padding token, which fills a prompt up; use Gemma-3's")
    return Tokenizer(backend, bos_id, pad_id)


def byte_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte, ids below 512, special ids as Gemma's: for random weights, so nothing is downloaded."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*_BYTE_TOKENS, *alphabet))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(list(_BYTE_TOKENS))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, bos_id=vocab["<bos>"], pad_id=vocab["<pad>"])
