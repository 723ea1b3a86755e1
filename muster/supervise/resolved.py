"""The configuration as the services of one run get it: every default and path written out.

Pure, but for the number of cores. Promise: what `toml_of` writes, load_config reads back
equal. Does not cover: where it is written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from muster.config import Config


def resolve(config: Config, *, redis_url: str, model: str) -> Config:
    """`config` with the address of the server and the model folder that were settled on.

    Several replicas that name no number of threads get an equal share of the cores each.
    """
    sections = dict(config.sections)
    inference = sections.get("inference")
    if inference is not None and config.replicas > 1 and getattr(inference, "threads", 1) == 0:
        share = max(1, (os.cpu_count() or 1) // config.replicas)
        sections["inference"] = inference.model_copy(update={"threads": share})
    return config.model_copy(
        update={
            "sections": sections,
            "redis": config.redis.model_copy(update={"url": redis_url}),
            "model": config.model.model_copy(update={"path": model}),
        }
    )


def toml_of(config: Config) -> str:
    """`config` as TOML; a setting without a value as a comment."""
    data: dict[str, Any] = config.model_dump(mode="json", exclude={"sections"})
    for name, section in config.sections.items():
        data[name] = section.model_dump(mode="json")
    return "\n".join(_table(data, ())) + "\n"


def _table(data: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(_key(part) for part in path)}]"
    inner = {key: value for key, value in data.items() if isinstance(value, dict)}
    for key, value in data.items():
        if value is None:  # TOML has no word for that
            yield f"# {_key(key)} is not set"
        elif key not in inner:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in inner.items():
        yield from _table(value, (*path, key))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
