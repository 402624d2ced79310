"""Headers of safetensors files byte by byte, and every way a checkpoint can be found or refused."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from vgen.checkpoint_files import (
    LTX2_FOLDERS,
    Checkpoint,
    TextEncoderFiles,
    UpsamplerFiles,
    resolve,
    resolve_text_encoder,
    resolve_upsampler,
)
from vgen.checkpoint_headers import CheckpointError, read_header
from vgen.checkpoint_paths import WEIGHTS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"transformer": {"num_layers": 1}, "vae": {}}


def write(path: Path, header: Mapping[str, Any] | bytes, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, dtype: str = "F32", shape: Sequence[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def write_official(path: Path, names: Sequence[str] = ("a",), config: object = CONFIG, dtype: str = "F32") -> Path:
    tensors = {name: entry(4 * i, 4 * i + 4, dtype, [4 if "8" in dtype else 1]) for i, name in enumerate(names)}
    metadata = {} if config is None else {"__metadata__": {"config": json.dumps(config)}}
    return write(path, {**metadata, **tensors}, bytes(4 * len(names)))


def write_diffusers(folder: Path, folders: Sequence[str] = LTX2_FOLDERS) -> Path:
    for name in folders:
        write_official(folder / name / "diffusion_pytorch_model.safetensors", (f"{name}.weight",), None)
        (folder / name / "config.json").write_text(json.dumps({"_class_name": name}))
    (folder / "model_index.json").write_text("{}")
    return folder


def write_gemma(folder: Path) -> Path:
    write_official(folder / "model.safetensors", ("language_model.model.norm.weight",), None)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


UPSAMPLER_NAMES = ("initial_conv.weight", "post_upsample_res_blocks.0.conv1.weight")


def write_upsampler(folder: Path) -> Path:
    write_official(folder / "diffusion_pytorch_model.safetensors", UPSAMPLER_NAMES, None)
    (folder / "config.json").write_text(json.dumps({"mid_channels": 32}))
    return folder


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_header_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {
        "b.weight": torch.randn(3, 5),
        "a.bias": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(4),
        "mask": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"config": "{}"})
    header = read_header(path)
    content = path.read_bytes()
    assert header.metadata == {"config": "{}"}
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert content[info.start : info.end] == bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    assert {name: info.dtype for name, info in header.tensors.items()} == {
        "b.weight": "F32",
        "a.bias": "BF16",
        "scalar": "I64",
        "mask": "BOOL",
        "none": "F32",
    }


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry(0, 16)}, bytes(12), "its header says 86 bytes, the file has 82"),
        ({"a": entry(0, 16)}, bytes(20), "4 bytes after its last tensor"),
        ({}, b"", "holds no tensors"),
        ({"__metadata__": {"config": "{}"}}, b"", "holds no tensors"),
        (
            {"a": entry(0, 16), "b": entry(12, 28)},
            bytes(28),
            "'b' (F32 [4]) should fill [149, 165) and claims [145, 161)",
        ),
        ({"a": entry(0, 16), "b": entry(20, 36)}, bytes(36), "should fill"),
        ({"a": entry(0, 16, shape=[5])}, bytes(16), "should fill"),
        ({"a": entry(0, 16, "F33")}, bytes(16), "unknown dtype F33 for 'a'"),
        ({"a": {"dtype": "F32"}}, b"", "damaged safetensors header (KeyError('data_offsets'))"),
        (b'{"a": ', b"", "damaged safetensors header"),
        (b'["not", "a", "mapping"]', b"", "is not a safetensors file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    message = refusal(lambda: read_header(path))
    assert str(path) in message
    assert says in message


def test_a_file_cut_inside_its_header_is_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 16)}, bytes(16))
    path.write_bytes(path.read_bytes()[:30])
    assert "is truncated: its header says 70 bytes, the file has 30; download it again" in refusal(
        lambda: read_header(path)
    )


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.ckpt", b"\x80\x02}q\x00.", "is a pickle file"),
        ("x.bin", b"", "is a pickle file"),
        ("x.safetensors", b"PK\x03\x04" + bytes(100), "is a pickle file"),
        ("x.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("x.safetensors", b"GGUF" + bytes(100), "is not a safetensors file"),
        ("x.safetensors", b"abc", "is not a safetensors file"),
        ("x.safetensors", b"", "is not a safetensors file"),
    ],
)
def test_other_files_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert says in refusal(lambda: read_header(path))
    assert "there is no file" in refusal(lambda: read_header(tmp_path / "other.safetensors"))


def test_torch_pickles_are_refused_under_any_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(3)}, path)
    assert "is a pickle file, which can run any code when it is read; use the .safetensors" in refusal(
        lambda: resolve(str(path))
    )


def test_resolves_an_official_file_alone_and_in_a_folder(tmp_path: Path) -> None:
    path = write_official(tmp_path / "ltx.safetensors")
    write_official(tmp_path / "upsampler.safetensors", UPSAMPLER_NAMES)
    write_official(tmp_path / "lora.safetensors", ("a.lora_A.weight",))
    write_official(tmp_path / "other.safetensors", config=None)
    for asked in (path, tmp_path):
        found = resolve(str(asked))
        assert (found.layout, found.id, found.revision, found.path) == ("official", str(asked), None, path)
        assert found.config == CONFIG
        assert set(found.headers) == {""}
        assert set(found.headers[""][0].tensors) == {"a"}


def test_resolves_a_diffusers_folder(tmp_path: Path) -> None:
    found = resolve(str(write_diffusers(tmp_path)))
    assert (found.layout, found.id, found.revision, found.path) == ("diffusers", str(tmp_path), None, tmp_path)
    assert found.config == {name: {"_class_name": name} for name in LTX2_FOLDERS}
    assert {name: set(headers[0].tensors) for name, headers in found.headers.items()} == {
        name: {f"{name}.weight"} for name in LTX2_FOLDERS
    }


def test_sharded_weights_are_read_by_their_index(tmp_path: Path) -> None:
    folder = write_diffusers(tmp_path) / "transformer"
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    names = {f"{part}.weight": f"diffusion_pytorch_model-0000{part}-of-00002.safetensors" for part in (1, 2)}
    for name, file in names.items():
        write_official(folder / file, (name,), None)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    headers = resolve(str(tmp_path)).headers["transformer"]
    assert [set(header.tensors) for header in headers] == [{"1.weight"}, {"2.weight"}]
    (folder / names["2.weight"]).unlink()
    assert (
        f"lacks 1 of 2 files of diffusion_pytorch_model.safetensors.index.json, first {names['2.weight']}"
        in refusal(lambda: resolve(str(tmp_path)))
    )


def test_the_kind_is_read_from_names_config_and_scheduler(tmp_path: Path) -> None:
    for name, kind in (("ltx-2-dev", "dev"), ("ltx-2-distilled", "distilled"), ("ltx-2", None)):
        assert resolve(str(write_official(tmp_path / "distilled" / f"{name}.safetensors"))).kind == kind
    stepped = write_official(tmp_path / "x-dev.safetensors", config={**CONFIG, "allowed_inference_steps": [1.0, 0.5]})
    assert resolve(str(stepped)).kind == "distilled"
    folder = write_diffusers(tmp_path / "LTX-2")
    assert resolve(str(folder)).kind is None
    (folder / "scheduler").mkdir()
    for dynamic, kind in ((True, "dev"), (False, "distilled")):
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"use_dynamic_shifting": dynamic}))
        assert resolve(str(folder)).kind == resolve(f"{folder}/").kind == kind
    assert resolve(str(write_diffusers(tmp_path / "LTX-2-Distilled"))).kind == "distilled"


def test_the_version_is_read_from_the_switches(tmp_path: Path) -> None:
    switches = (
        "apply_gated_attention",
        "cross_attention_adaln",
        "caption_proj_before_connector",
        "connector_apply_gated_attention",
    )
    new = {**CONFIG, "transformer": dict.fromkeys(switches, True)}
    assert resolve(str(write_official(tmp_path / "old.safetensors"))).version == "2.0"
    assert resolve(str(write_official(tmp_path / "new.safetensors", config=new))).version == "2.3"
    folder = write_diffusers(tmp_path / "diffusers")
    assert resolve(str(folder)).version == "2.0"
    parts = ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod")
    text = ("per_modality_projections", "video_gated_attn", "audio_gated_attn")
    transformer = {**dict.fromkeys(parts, True), "use_prompt_embeddings": False}
    (folder / "transformer" / "config.json").write_text(json.dumps(transformer))
    (folder / "connectors" / "config.json").write_text(json.dumps(dict.fromkeys(text, True)))
    assert resolve(str(folder)).version == "2.3"


@pytest.mark.parametrize(
    ("names", "config", "dtype", "says"),
    [
        (("diffusion_model.x.lora_A.weight",), None, "F32", "is a LoRA; use the checkpoint that it was made for"),
        (("diffusion_model.x.lora_A.weight",), CONFIG, "F8_E4M3", "is a LoRA"),
        (
            ("a", "b"),
            CONFIG,
            "F8_E4M3",
            "is cast to fp8 without scales (2 weights, 'a' is F8_E4M3); this version loads",
        ),
        (("a",), CONFIG, "U8", "is quantized (1 weights, 'a' is U8)"),
        (UPSAMPLER_NAMES, CONFIG, "F32", "is a latent upsampler; use a file with the full model"),
        (("language_model.model.norm.weight",), None, "F32", "is a Gemma text encoder"),
        (
            ("transformer_blocks.0.audio_attn1.to_q.weight",),
            None,
            "F32",
            "is a diffusers transformer of LTX-2; give its parent folder",
        ),
        (("vae.decoder.conv_in.conv.weight",), CONFIG, "F32", "holds only the video VAE of LTX-2"),
        (("model.diffusion_model.patchify_proj.weight",), CONFIG, "F32", "is a model of LTX-Video 0.9"),
        (("a",), None, "F32", "no 'config' in its metadata; use an official LTX-2 file"),
        (("a",), {"vae": {}}, "F32", "describes vae but no transformer"),
        (("a",), {}, "F32", "describes no sections but no transformer"),
        (("a",), ["x"], "F32", "has a list as 'config' in its metadata, not an object"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, names: Sequence[str], config: object, dtype: str, says: str) -> None:
    path = write_official(tmp_path / "x.safetensors", names, config, dtype)
    message = refusal(lambda: resolve(str(path)))
    assert str(path) in message
    assert says in message


@pytest.mark.parametrize(
    ("name", "says"),
    [("LTXVideoTransformer3DModel", "is of LTX-Video 0.9, which has no sound"), ("WanTransformer3DModel", "is of Wan")],
)
def test_diffusers_folders_of_other_models_are_named(tmp_path: Path, name: str, says: str) -> None:
    folder = write_diffusers(tmp_path, ("transformer", "vae"))
    (folder / "transformer" / "config.json").write_text(json.dumps({"_class_name": name}))
    message = refusal(lambda: resolve(str(folder)))
    assert says in message
    assert f"({name}); use one of LTX-2" in message


def test_resolves_an_upsampler_as_a_file_and_as_a_folder(tmp_path: Path) -> None:
    file = write_official(tmp_path / "x.safetensors", UPSAMPLER_NAMES, {"mid_channels": 32})
    alone = write_upsampler(tmp_path / "alone")
    inside = write_upsampler(tmp_path / "pipeline" / "latent_upsampler")
    for asked, path, layout in (
        (file, file, "official"),
        (alone, alone, "diffusers"),
        (inside.parent, inside, "diffusers"),
    ):
        found = resolve_upsampler(str(asked))
        assert (found.layout, found.id, found.revision, found.path) == (layout, str(asked), None, path)
        assert found.config == {"mid_channels": 32}
        assert set(found.headers[0].tensors) == set(UPSAMPLER_NAMES)
        assert UpsamplerFiles.from_mapping(json.loads(json.dumps(found.to_mapping()))) == found


def test_what_is_no_upsampler_is_refused(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        return refusal(lambda: resolve_upsampler(str(path)))

    full = said(write_official(tmp_path / "full.safetensors", ("model.diffusion_model.audio_patchify_proj.weight",)))
    assert "full.safetensors is an LTX-2 model, and an upsampler is asked for; use a file like ltx-2-spatial" in full
    assert "is a LoRA, and" in said(write_official(tmp_path / "lora.safetensors", ("a.lora_A.weight",)))
    assert "holds no latent upsampler, and" in said(write_official(tmp_path / "other.safetensors"))
    assert "holds no latent_upsampler/config.json" in said(write_diffusers(tmp_path / "diffusers"))
    quantized = write_official(tmp_path / "fp8.safetensors", UPSAMPLER_NAMES, {"mid_channels": 32}, "F8_E4M3")
    assert "is cast to fp8" in said(quantized)
    assert "revision 'main' does not apply" in refusal(lambda: resolve_upsampler(str(quantized), "main"))


def test_config_metadata_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"__metadata__": {"config": "{"}, "a": entry(0, 4)}, bytes(4))
    assert "'config' in its metadata that is no JSON" in refusal(lambda: resolve(str(path)))


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds neither a diffusers checkpoint" in refusal(lambda: resolve(str(empty)))
    assert "it is a Gemma text encoder, which has its own setting" in refusal(
        lambda: resolve(str(write_gemma(tmp_path / "gemma")))
    )
    write_official(tmp_path / "two" / "a.safetensors")
    write_official(tmp_path / "two" / "b.safetensors")
    assert "holds 2 official files (a.safetensors, b.safetensors); name one" in refusal(
        lambda: resolve(str(tmp_path / "two"))
    )
    partial = write_diffusers(tmp_path / "partial", ("transformer", "vae"))
    assert "lacks connectors/config.json, audio_vae/config.json, vocoder/config.json" in refusal(
        lambda: resolve(str(partial))
    )
    bad = write_diffusers(tmp_path / "bad")
    (bad / "vae" / "config.json").write_text("[1]")
    assert "config.json holds a list, not a JSON object" in refusal(lambda: resolve(str(bad)))
    (bad / "vae" / "config.json").write_text("{")
    assert "config.json is no readable JSON" in refusal(lambda: resolve(str(bad)))


def test_weights_of_a_folder_must_be_one_safetensors_file(tmp_path: Path) -> None:
    folder = write_diffusers(tmp_path) / "vocoder"
    write_official(folder / "other.safetensors", ("a",), None)
    assert f"{folder} has 2 safetensors files and no index" in refusal(lambda: resolve(str(tmp_path)))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert f"{folder} has no .safetensors file" in refusal(lambda: resolve(str(tmp_path)))
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"")
    assert "diffusion_pytorch_model.bin is a pickle file" in refusal(lambda: resolve(str(tmp_path)))
    write_official(folder / "diffusion_pytorch_model.safetensors", ("a",), None, "F8_E5M2")
    assert "is cast to fp8 without scales" in refusal(lambda: resolve(str(tmp_path)))


def test_resolves_a_text_encoder_alone_and_inside_a_diffusers_folder(tmp_path: Path) -> None:
    alone = write_gemma(tmp_path / "gemma")
    found = resolve_text_encoder(str(alone))
    assert (found.folder, found.tokenizer_folder, found.revision) == (alone, alone, None)
    assert found.config == {"model_type": "gemma3"}
    assert set(found.headers[0].tensors) == {"language_model.model.norm.weight"}

    whole = write_diffusers(tmp_path / "diffusers")
    write_gemma(whole / "text_encoder")
    (whole / "tokenizer").mkdir()
    (whole / "text_encoder" / "tokenizer.json").rename(whole / "tokenizer" / "tokenizer.json")
    for found in (resolve_text_encoder(str(whole)), resolve_text_encoder(None, None, resolve(str(whole)))):
        assert (found.id, found.folder, found.tokenizer_folder) == (
            str(whole),
            whole / "text_encoder",
            whole / "tokenizer",
        )


def test_text_encoders_that_are_none(tmp_path: Path) -> None:
    official = resolve(str(write_official(tmp_path / "ltx.safetensors")))
    assert "an official LTX-2 file has none inside" in refusal(lambda: resolve_text_encoder(None, None, official))
    folder = write_gemma(tmp_path / "gemma")
    (folder / "tokenizer.json").unlink()
    assert f"lacks tokenizer.json in {folder}" in refusal(lambda: resolve_text_encoder(str(folder)))
    (folder / "config.json").unlink()
    assert f"lacks config.json in {folder}" in refusal(lambda: resolve_text_encoder(str(folder)))
    assert "names one file; give the repository: 'org/name'" in refusal(
        lambda: resolve_text_encoder("org/name/model.safetensors")
    )


def test_files_survive_the_way_to_another_process(tmp_path: Path) -> None:
    official = resolve(str(write_official(tmp_path / "ltx.safetensors")))
    diffusers = resolve(str(write_diffusers(tmp_path / "diffusers")))
    for checkpoint in (official, diffusers):
        assert Checkpoint.from_mapping(json.loads(json.dumps(checkpoint.to_mapping()))) == checkpoint
    text_encoder = resolve_text_encoder(str(write_gemma(tmp_path / "gemma")))
    assert TextEncoderFiles.from_mapping(json.loads(json.dumps(text_encoder.to_mapping()))) == text_encoder


@pytest.mark.parametrize("asked", ["/nowhere/x.safetensors", "./x", "~/nowhere", "name", "org/na me", ""])
def test_what_is_neither_here_nor_a_hub_id_is_refused(asked: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if asked == "":
        asked = "nowhere"
    assert f"'{asked}' is no file or folder on this machine and no hub id" in refusal(lambda: resolve(asked))


def test_a_revision_needs_a_hub_id(tmp_path: Path) -> None:
    path = write_official(tmp_path / "ltx.safetensors")
    assert "revision 'main' does not apply to the local path" in refusal(lambda: resolve(str(path), "main"))
    folder = write_gemma(tmp_path / "gemma")
    assert "revision 'main' does not apply" in refusal(lambda: resolve_text_encoder(str(folder), "main"))


def test_what_begins_with_vgen_is_a_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = resolve("vgen://ltx2_tiny/ltx-2-tiny.safetensors")
    assert (model.id, model.revision, model.layout) == ("vgen://ltx2_tiny/ltx-2-tiny.safetensors", None, "official")
    assert model.path == WEIGHTS / "ltx2_tiny" / "ltx-2-tiny.safetensors"
    assert model.version == "2.0" and model.kind is None
    assert Checkpoint.from_mapping(json.loads(json.dumps(model.to_mapping()))) == model
    text_encoder = resolve_text_encoder("vgen://ltx2_tiny/gemma")
    assert text_encoder.id == "vgen://ltx2_tiny/gemma"
    assert text_encoder.folder == text_encoder.tokenizer_folder == WEIGHTS / "ltx2_tiny" / "gemma"
    upsampler = resolve_upsampler("vgen://ltx2_tiny/ltx-2-tiny-spatial-upscaler-x2.safetensors")
    assert upsampler.path.parent == WEIGHTS / "ltx2_tiny"
    assert "revision 'main' does not apply" in refusal(lambda: resolve(model.id, "main"))


@pytest.mark.parametrize("find", [resolve, resolve_text_encoder, resolve_upsampler])
def test_what_the_package_lacks_is_refused(find: Callable[[str], object]) -> None:
    message = refusal(lambda: find("vgen://ltx2_tiny/other.safetensors"))
    assert message.startswith("'vgen://ltx2_tiny/other.safetensors' is not in this installation of vgen")
    assert str(WEIGHTS / "ltx2_tiny" / "other.safetensors") in message


@pytest.mark.parametrize("path", ["../config.py", "ltx2_tiny/../../config.py", "/etc/hostname", "..", ".", ""])
def test_no_path_leads_out_of_the_package(path: str) -> None:
    assert f"'vgen://{path}' is outside of vgen's own weights" in refusal(lambda: resolve(f"vgen://{path}"))


def test_only_safetensors_files_are_asked_of_the_hub() -> None:
    assert "'x.ckpt' of org/name is not a safetensors file" in refusal(lambda: resolve("org/name/x.ckpt"))


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A hub cache that holds org/name at COMMIT, which is its main branch: everything in one repository."""
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    write_official(snapshot / "ltx.safetensors")
    write_gemma(write_diffusers(snapshot) / "text_encoder")
    (snapshot / "tokenizer").mkdir()
    (snapshot / "text_encoder" / "tokenizer.json").rename(snapshot / "tokenizer" / "tokenizer.json")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


_ASK = """
import json, sys
from vgen.checkpoint_files import resolve, resolve_text_encoder
from vgen.checkpoint_headers import CheckpointError
for asked, revision in json.loads(sys.argv[1]):
    try:
        found = resolve(asked, revision)
        text = resolve_text_encoder(None, None, found) if found.layout == "diffusers" else None
        print(found.layout, found.id, found.revision, text and text.revision)
    except CheckpointError as error:
        print(error)
"""


def ask(cache: Path, questions: list[list[str | None]], environment: Mapping[str, str]) -> list[str]:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    command = [sys.executable, "-c", _ASK, json.dumps(questions)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_the_cache_serves_without_network(hub_cache: Path, environment: Mapping[str, str]) -> None:
    questions = [["org/name/ltx.safetensors", None], ["org/name", "main"], ["org/name", COMMIT]]
    start = time.monotonic()
    assert ask(hub_cache, questions, environment) == [
        f"official org/name/ltx.safetensors {COMMIT} None",
        f"diffusers org/name {COMMIT} {COMMIT}",
        f"diffusers org/name {COMMIT} {COMMIT}",
    ]
    assert time.monotonic() - start < 15, "the hub client's retries take 23 s"


def test_what_the_cache_lacks_is_refused_without_network(hub_cache: Path) -> None:
    (hub_cache / "models--org--name" / "snapshots" / COMMIT / "vae" / "config.json").unlink()
    questions = [
        ["org/name/absent.safetensors", None],
        ["org/other", "v2"],
        ["org/other", COMMIT],
        ["org/name", COMMIT],
    ]
    lines = ask(hub_cache, questions, {"HF_HUB_OFFLINE": "1"})
    reason = "is not on this machine and cannot be fetched; the hub is out of reach (or HF_HUB_OFFLINE is set)"
    assert lines[0].startswith(f"'org/name/absent.safetensors' {reason}")
    assert lines[1].startswith(f"'org/other' at revision 'v2' {reason}")
    assert lines[2].startswith(f"'org/other' at revision '{COMMIT}' {reason}")
    assert "lacks vae/config.json" in lines[3] or "the cache lacks it" in lines[3]  # by version of the hub client


def test_only_the_needed_files_of_a_repository_are_fetched(tmp_path: Path, monkeypatch: Any) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    folders = [
        *(f"{name}/{file}" for name in LTX2_FOLDERS for file in ("config.json", "diffusion_pytorch_model.safetensors")),
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "model_index.json",
    ]
    text = ["text_encoder/config.json", "text_encoder/model-00001-of-00005.safetensors", "tokenizer/tokenizer.json"]
    text += ["text_encoder/model.safetensors.index.json", "tokenizer/tokenizer_config.json"]
    others = ["ltx-2-19b-dev.safetensors", "ltx-2-19b-dev-fp8.safetensors", "latent_upsampler/config.json", "README.md"]
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        raise OSError("enough is known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = [*folders, *text, *others]
    refusal(lambda: resolve("Lightricks/LTX-2", "v1"))
    assert (asked["repo"], asked["revision"]) == ("Lightricks/LTX-2", "v1")
    assert set(filter_repo_objects(files, allow_patterns=asked["allow_patterns"])) == set(folders)
    refusal(lambda: resolve_text_encoder("Lightricks/LTX-2"))
    assert set(filter_repo_objects(files, allow_patterns=asked["allow_patterns"])) == set(text)
    gemma = ["config.json", "model-00001-of-00005.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    assert set(filter_repo_objects([*gemma, *others], allow_patterns=asked["allow_patterns"])) == set(gemma)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("GatedRepoError", "its licence is not accepted: accept it on https://huggingface.co/org/name"),
        ("RepositoryNotFoundError", "the hub has no such repository, or it is private"),
        ("RevisionNotFoundError", "the hub has no such revision"),
        ("EntryNotFoundError", "the repository has no such file"),
        ("HTTPError", "the hub client failed (HTTPError: first line): try again"),
    ],
)
def test_each_hub_failure_has_its_sentence(monkeypatch: Any, kind: str, says: str) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    base = getattr(errors, kind, None) or type(kind, (Exception,), {})
    # The real exceptions want a response to be built from; only their class and text matter here.
    fake = type(kind, (base,), {"__init__": lambda self: None, "__str__": lambda self: "first line\nsecond line"})

    def fail(*_: object, **__: object) -> str:
        raise fake()

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    message = refusal(lambda: resolve("org/name/x.safetensors", "v1"))
    assert message.startswith("'org/name/x.safetensors' at revision 'v1' is not on this machine and cannot be fetched;")
    assert says in message


def test_nothing_heavy_is_imported() -> None:
    modules = "vgen.checkpoint_files, vgen.wan_files, vgen.models.ltx2.keys, vgen.models.ltx2.config"
    heavy = "{'torch', 'huggingface_hub', 'transformers', 'safetensors'} & set(sys.modules)"
    code = f"import sys, {modules}; sys.exit(str({heavy}) if {heavy} else 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
