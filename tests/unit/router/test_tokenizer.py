"""The codec of a model folder says what the folder's own tokenizer and template say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.router.adapters.tokenizer import HfChatCodec
from services.router.carriers import Message

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with two markup tokens, and a template."""
    made = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<e>", special=True)])
    tokenizer.save(str(made / "tokenizer.json"))
    settings = {"eos_token": "<e>", "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return made


@pytest.fixture(scope="module")
def codec(folder: Path) -> HfChatCodec:
    return HfChatCodec(folder)


@pytest.mark.parametrize("text", ["", "ls -l", "<s>user<e>", "naïve \x00 ☃\n" * 300])
def test_ids_are_those_of_the_folders_tokenizer(
    folder: Path, codec: HfChatCodec, text: str
) -> None:
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert codec.encode(text, special=True) == own.encode(text, add_special_tokens=False).ids


def test_markup_of_a_message_is_text(codec: HfChatCodec) -> None:
    (end,) = codec.stop_ids
    assert end in codec.encode("<e>", special=True)
    assert end not in codec.encode("<e>", special=False)
    assert codec.decode(tuple(codec.encode("<e>", special=False))) == "<e>"


@pytest.mark.parametrize("size", [1, 1000])
def test_a_chat_is_rendered_anew_for_other_messages(codec: HfChatCodec, size: int) -> None:
    one, other = (Message("user", "a" * size),), (Message("user", "b" * size),)
    rendered = [codec.render(chat, generate=g) for chat in (one, other, one) for g in (True, False)]
    assert rendered[0] == f"<s>user {'a' * size}<e><s>assistant "
    assert rendered[1] == f"<s>user {'a' * size}<e>"
    assert rendered[2] == f"<s>user {'b' * size}<e><s>assistant "
    assert rendered[4:] == rendered[:2]
