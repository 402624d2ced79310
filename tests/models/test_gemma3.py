"""The text encoder: tokens and hidden states against transformers' own loading of the same folder."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, Gemma3TextModel

from tests.tiny_ltx2 import HIDDEN_SIZE, NUM_STATES, TEXT_LENGTH, gemma_text_config, tiny_checkpoints
from vgen.checkpoint import load_module, text_encoder_source
from vgen.checkpoint_files import resolve_text_encoder
from vgen.checkpoint_headers import CheckpointError
from vgen.models.gemma3 import (
    GEMMA3_12B,
    TextEncoderError,
    build_text_encoder,
    byte_tokenizer,
    encode_hidden_states,
    hidden_sizes,
    load_tokenizer,
    restore_buffers,
    text_config,
)
from vgen.random_weights import fill_random

PROMPTS = ["  A red fox runs through deep snow.\n", "Rain", ""]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The way the real encoder goes: find, build on meta, load."""
    files = resolve_text_encoder(str(folder))
    with torch.device("meta"):
        model = build_text_encoder(files.config)
    with text_encoder_source(files) as source:
        load_module(model, source, device="cpu", dtype=dtype)
    return model


@torch.no_grad()
def states_of(model: nn.Module, folder: Path) -> tuple[Tensor, ...]:
    tokens = load_tokenizer(resolve_text_encoder(str(folder)).tokenizer_folder).tokenize(PROMPTS, TEXT_LENGTH)
    return encode_hidden_states(model, tokens.input_ids, tokens.attention_mask)


@torch.no_grad()
def reference_states(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """transformers alone, as the diffusers pipeline uses it."""
    model = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer(
        [prompt.strip() for prompt in PROMPTS], padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt"
    )
    states: tuple[Tensor, ...] = model(**inputs, output_hidden_states=True).hidden_states
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_transformers(dtype: torch.dtype) -> None:
    folder = tiny_checkpoints().gemma
    ours, theirs = states_of(loaded(folder, dtype), folder), reference_states(folder, dtype)
    assert len(ours) == len(theirs) == NUM_STATES
    for layer, (state, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert state.shape == (len(PROMPTS), TEXT_LENGTH, HIDDEN_SIZE)
        assert state.dtype == dtype
        assert state.equal(expected), layer
    assert all(state.std() > 0.05 for state in ours)


def test_the_text_encoder_of_a_diffusers_folder_is_the_same() -> None:
    tiny = tiny_checkpoints()
    ours, theirs = states_of(loaded(tiny.diffusers), tiny.diffusers), states_of(loaded(tiny.gemma), tiny.gemma)
    assert all(state.equal(expected) for state, expected in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.", ""])
def test_every_layout_of_the_weights_loads(tmp_path: Path, prefix: str) -> None:
    source = tiny_checkpoints().gemma
    folder = Path(shutil.copytree(source, tmp_path / "gemma"))
    tensors = load_file(source / "model.safetensors")
    text, others = {}, {}
    for name, tensor in tensors.items():
        (text if "language_model" in name else others)[name] = tensor
    assert len(text) == 2 + 3 * 13
    assert others
    bare = {
        name.replace("language_model.model.", "").replace("model.language_model.", ""): t for name, t in text.items()
    }
    renamed = {prefix + name: tensor for name, tensor in bare.items()}
    if prefix != "":
        heads = {"model.language_model.": "lm_head.weight", "model.": "lm_head.weight"}
        renamed[heads.get(prefix, "language_model.lm_head.weight")] = torch.zeros(2, 2)
        start = "model." if prefix == "model.language_model." else ""
        renamed |= {start + name.removeprefix("model."): tensor for name, tensor in others.items()}
    save_file(renamed, folder / "model.safetensors")
    ours, theirs = states_of(loaded(folder), folder), states_of(loaded(source), source)
    assert all(state.equal(expected) for state, expected in zip(ours, theirs, strict=True))


def test_sharded_weights_and_a_flat_config_load(tmp_path: Path) -> None:
    source = tiny_checkpoints().gemma
    model = Gemma3TextModel(Gemma3TextConfig(**gemma_text_config()))
    model.load_state_dict(loaded(source).state_dict())
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    shutil.copy(source / "tokenizer.json", tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma3_text"
    ours, theirs = states_of(loaded(tmp_path), tmp_path), states_of(loaded(source), source)
    assert all(state.equal(expected) for state, expected in zip(ours, theirs, strict=True))


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    source = tiny_checkpoints().gemma
    folder = Path(shutil.copytree(source, tmp_path / "gemma"))
    tensors = load_file(source / "model.safetensors")
    removed = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    del tensors[removed]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"Gemma3TextModel: 1 missing \(layers\.1\.mlp\.up_proj\.weight\);"):
        loaded(folder)


def test_padding_changes_nothing_before_it_counts() -> None:
    """Left padding: the valid states depend on their positions, which count padding, and on nothing else of it."""
    folder = tiny_checkpoints().gemma
    model, tokenizer = loaded(folder), load_tokenizer(folder)
    tokens = tokenizer.tokenize(["Rain on a tin roof"], TEXT_LENGTH)
    valid = tokens.attention_mask[0].bool()
    assert 5 < valid.sum() < TEXT_LENGTH
    other = tokens.input_ids.clone()
    other[0, ~valid] = 17
    with torch.no_grad():
        ours = encode_hidden_states(model, tokens.input_ids, tokens.attention_mask)
        theirs = encode_hidden_states(model, other, tokens.attention_mask)
    assert all(a[:, valid].equal(b[:, valid]) for a, b in zip(ours, theirs, strict=True))
    assert not ours[0].equal(theirs[0])


def test_buffers_that_no_file_has_are_those_of_transformers() -> None:
    expected = Gemma3TextModel(Gemma3TextConfig(**gemma_text_config()))
    with torch.device("meta"):
        model = build_text_encoder({"model_type": "gemma3", "text_config": gemma_text_config()})
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers, theirs = dict(model.named_buffers()), dict(expected.named_buffers())
    assert set(buffers) == set(theirs)
    assert len(buffers) == 5
    for name, buffer in buffers.items():
        assert buffer.device.type == "cpu"
        assert buffer.dtype == theirs[name].dtype
        assert buffer.equal(theirs[name]), name
    local, wide = (buffers[f"rotary_emb.{kind}_attention_inv_freq"] for kind in ("sliding", "full"))
    assert local[-1].item() == pytest.approx(10000 ** (-14 / 16))
    assert wide[0].item() == 1 / 8
    for name in buffers:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffers[name].to("meta")
    restore_buffers(model, "cpu")
    assert all(buffer.equal(theirs[name]) for name, buffer in model.named_buffers())


def test_loading_in_bf16_keeps_the_rotary_frequencies_in_fp32() -> None:
    model = loaded(tiny_checkpoints().gemma, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_random_weights_encode() -> None:
    with torch.device("meta"):
        model = build_text_encoder(gemma_text_config())
    fill_random(model, seed=0, device="cpu", dtype=torch.float32, prefix="text_encoder")
    tokens = byte_tokenizer().tokenize(["fox", "cat"], 16)
    with torch.no_grad():
        states = encode_hidden_states(model, tokens.input_ids, tokens.attention_mask)
    assert hidden_sizes(model) == (HIDDEN_SIZE, NUM_STATES) == (states[0].shape[-1], len(states))
    valid = tokens.attention_mask.bool()
    assert all(state[valid].isfinite().all() for state in states)
    assert (states[-1][0, -1] - states[-1][1, -1]).abs().max() > 0.1


def test_the_full_size_is_gemma_3_12b() -> None:
    with torch.device("meta"):
        model: Any = build_text_encoder(GEMMA3_12B)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_766_034_176
    assert hidden_sizes(model) == (3840, 49)
    config = model.config
    assert [kind == "full_attention" for kind in config.layer_types] == [layer % 6 == 5 for layer in range(48)]
    assert config.sliding_window == 1024
    full, local = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    assert (full["rope_theta"], full["rope_type"], full["factor"]) == (1e6, "linear", 8.0)
    assert (local["rope_theta"], local["rope_type"]) == (1e4, "default")
    with pytest.raises(TypeError):
        GEMMA3_12B["hidden_size"] = 1  # type: ignore[index]


def test_both_kinds_of_config_are_read_and_others_refused() -> None:
    flat = gemma_text_config()
    nested = Gemma3Config(text_config=flat).to_dict()
    assert text_config(nested)["hidden_size"] == text_config(flat)["hidden_size"] == HIDDEN_SIZE
    text_config(flat)["rope_scaling"]["factor"] = 1.0
    assert flat["rope_scaling"]["factor"] == 8.0
    for config in ({"model_type": "t5"}, {}, {"model_type": "gemma3"}, {"model_type": "gemma4", "text_config": flat}):
        with pytest.raises(TextEncoderError, match=r"LTX-2 needs Gemma-3 \(gemma3 or gemma3_text\)"):
            build_text_encoder(config)


def test_tokens_are_those_of_transformers() -> None:
    folder = tiny_checkpoints().gemma
    reference = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [*PROMPTS, "a <bos> inside", "naïve 雪 🦊", "two  spaces\nand a line"]
    ours = load_tokenizer(folder).tokenize(prompts, 40)
    theirs = reference([p.strip() for p in prompts], padding="max_length", max_length=40, return_tensors="pt")
    assert ours.input_ids.dtype == ours.attention_mask.dtype == torch.int64
    assert ours.input_ids.equal(theirs.input_ids)
    assert ours.attention_mask.equal(theirs.attention_mask)
    assert ours.dropped == (0,) * len(prompts)


@pytest.mark.parametrize("kind", ["loaded", "bytes"])
def test_prompts_are_stripped_padded_left_and_start_with_bos(kind: str) -> None:
    tokenizer = load_tokenizer(tiny_checkpoints().gemma) if kind == "loaded" else byte_tokenizer()
    assert (tokenizer.bos_id, tokenizer.pad_id) == (2, 0)
    tokens = tokenizer.tokenize(["snow", " snow\t\n", ""], 12)
    ids, mask = tokens.input_ids, tokens.attention_mask
    assert ids.shape == mask.shape == (3, 12)
    assert ids[0].equal(ids[1])
    assert mask[2].tolist() == [0] * 11 + [1]
    assert ids[2].tolist() == [0] * 11 + [2]
    for row in range(3):
        first = int(mask[row].argmax())
        assert mask[row].tolist() == [0] * first + [1] * (12 - first)
        assert ids[row, first] == 2
        assert 1 not in ids[row].tolist()  # no EOS


def test_a_prompt_that_is_too_long_says_how_much_it_lost() -> None:
    tokenizer = byte_tokenizer()
    long = tokenizer.tokenize(["abcdefgh", "abc"], 5)
    assert long.dropped == (4, 0)
    assert long.input_ids[0].equal(tokenizer.tokenize(["abcdefgh"], 9).input_ids[0, :5])
    reference = AutoTokenizer.from_pretrained(tiny_checkpoints().gemma, padding_side="left")
    text = "A red fox runs through deep snow at sunrise"
    cut = reference([text], padding="max_length", truncation=True, max_length=8, return_tensors="pt")
    ours = load_tokenizer(tiny_checkpoints().gemma).tokenize([text], 8)
    assert ours.input_ids.equal(cut.input_ids)
    assert ours.dropped == (len(reference(text).input_ids) - 8,)


def test_bytes_of_any_script_are_tokens_below_512() -> None:
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(1, 256))) + "雪 🦊 снег"
    ids = tokenizer.tokenize([text], 2048).input_ids[0]
    num_bytes = len(text.strip().encode())
    assert (ids != 0).sum() == num_bytes + 1
    assert 3 not in ids.tolist()
    assert ids.max() < 512
    assert tokenizer.backend.decode(ids[-num_bytes:].tolist()) == text.strip()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"bos_token": "<absent>"}, "no beginning-of-sequence token"),
        ({"bos_token": None}, "no beginning-of-sequence token"),
        ({"pad_token": {"content": "<absent>"}}, "no padding token"),
    ],
)
def test_a_tokenizer_without_its_special_tokens_is_refused(
    tmp_path: Path, config: Mapping[str, Any], says: str
) -> None:
    shutil.copy(tiny_checkpoints().gemma / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TextEncoderError, match=says):
        load_tokenizer(tmp_path)


def test_a_missing_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextEncoderError, match="there is no"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TextEncoderError, match="is no readable tokenizer"):
        load_tokenizer(tmp_path)


def test_special_tokens_may_be_mappings_or_missing(tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoints().gemma / "tokenizer.json", tmp_path)
    for config in ({"bos_token": {"content": "<bos>"}, "pad_token": {"content": "<unk>"}}, {"eos_token": "<unk>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.bos_id, tokenizer.pad_id) == (2, 3)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (2, 0)


def test_importing_the_module_does_not_import_transformers() -> None:
    code = "import sys, vgen.models.gemma3, vgen.checkpoint; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
