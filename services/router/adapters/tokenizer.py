"""Chat codec of a Hugging Face model folder: `tokenizers` and `jinja2`, nothing heavier.

Promise: ids equal those of the folder's own fast tokenizer and template; messages' text can be
encoded with markup taken literally, in a thread beside others; what the template makes of short
messages is rendered once, for it depends on nothing else. Does not cover: tool definitions in
templates.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from muster.errors import ConfigError
from services.router.events import Message

_SHORT = 256  # characters of a chat whose rendering is kept


class HfChatCodec:
    """Implements services.router.conversation.ChatCodec."""

    def __init__(self, folder: Path):
        try:
            settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
            # Two instances: "encode markup literally" is a switch of the whole tokenizer.
            self._special = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._literal = Tokenizer.from_file(str(folder / "tokenizer.json"))
            generation = _json(folder / "generation_config.json")
            model = _json(folder / "config.json")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the model folder cannot be read ({error})",
                field="model.path",
                value=folder,
                way_out="name a Hugging Face folder with tokenizer.json and a chat template",
            ) from error
        self._literal.encode_special_tokens = True
        self._template = _template(folder, settings)
        self._tokens = {
            name: _text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")
        }
        self.stop_ids = self._stops(settings, generation, model)
        self._rendered = lru_cache(maxsize=64)(self._render)

    def _stops(
        self, settings: dict[str, Any], generation: dict[str, Any], model: dict[str, Any]
    ) -> tuple[int, ...]:
        found: list[int] = []
        eos = self._special.token_to_id(_text(settings.get("eos_token")))
        for value in (eos, generation.get("eos_token_id"), model.get("eos_token_id")):
            listed = value if isinstance(value, list) else [value]
            found += [int(v) for v in listed if v is not None]
        return tuple(dict.fromkeys(found))

    def render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        short = sum(len(m.text) for m in messages) <= _SHORT
        return (self._rendered if short else self._render)(messages, generate)

    def _render(self, messages: tuple[Message, ...], generate: bool) -> str:
        chat = [{"role": m.role, "content": m.text} for m in messages]
        return self._template.render(
            messages=chat, add_generation_prompt=generate, tools=None, **self._tokens
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        chosen = self._special if special else self._literal
        # Not `encode`: that one holds the interpreter's lock until it is done.
        return list(chosen.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: tuple[int, ...]) -> str:
        return str(self._special.decode(list(ids), skip_special_tokens=True))


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _template(folder: Path, settings: dict[str, Any]) -> jinja2.Template:
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else settings.get("chat_template")
    if not isinstance(source, str):
        raise ConfigError(
            "the model folder has no chat template",
            field="model.path",
            value=folder,
            way_out="use an instruct model, or add chat_template.jinja to the folder",
        )

    def refuse(message: str) -> None:
        raise ConfigError(
            f"the chat template refuses this chat: {message}",
            field="model.path",
            value=folder,
            way_out="use a template that takes system, user and assistant messages",
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)
