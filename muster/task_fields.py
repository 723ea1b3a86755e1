"""What is common to the settings of every task format: which keys there are, and reading them.

Owns: the four things that can become of a key, the settings that a format gives, and the checks
of single values. Promise: pure; whatever is wrong is collected, so that one examination names
all of it; what is wrong reads as absent meanwhile. Does not cover: which keys a format has
(task_toml.py, task_yaml.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from muster import instances
from muster.errors import InvalidInput
from muster.types import Value

T = TypeVar("T")
Use = Literal["honoured", "refused", "no effect", "descriptive"]
SPLITS = ("train", "eval", "limits")
SECONDS_MAX = 86400.0
_NOTHING: tuple[object, ...] = (None, "", 0, [], {})  # values of any key that ask for nothing
_HOST_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*:-([^}]*)\}")


class Field(Value, frozen=True):
    """What becomes of one key.

    honoured: it does what the format says, or its value is refused. refused: any value that asks
    for something is refused. no effect: accepted, and an examination remarks on it. descriptive:
    for people. `why` and `way_out` are for people too.
    """

    use: Use
    why: str = ""
    way_out: str = ""


HONOURED = Field("honoured")
DESCRIPTIVE = Field("descriptive")


class Remark(Value, frozen=True):
    """Something accepted that changes nothing here."""

    field: str
    text: str


class TaskSettings(Value, frozen=True):
    """What a settings file says, checked. Seconds and bytes; None where it says nothing."""

    name: str = ""
    instruction: str = ""  # Terminal-Bench 1 keeps it among the settings
    agent_timeout_s: float | None = None
    verifier_timeout_s: float = 600.0
    success_threshold: float = 1.0
    max_turns: int | None = None
    workdir: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    verifier_env: tuple[tuple[str, str], ...] = ()
    solution_env: tuple[tuple[str, str], ...] = ()
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    cpus: float | None = None
    image: str = ""
    split: str = SPLITS[0]
    verify: str = "sealed"
    parameters: tuple[instances.Parameter, ...] = ()


class Found:
    """What an examination found so far."""

    def __init__(self) -> None:
        self.refusals: list[InvalidInput] = []
        self.remarks: list[Remark] = []

    def refuse(self, field: str, problem: str, way_out: str) -> None:
        """Note something that cannot be honoured."""
        value = field if "/" in field else field.rpartition(".")[2]
        self.refusals.append(InvalidInput(problem, field=field, value=value, way_out=way_out))

    def remark(self, field: str, text: str) -> None:
        """Note something that is accepted without effect."""
        self.remarks.append(Remark(field, text))

    def attempt(self, read: Callable[[], T], otherwise: T) -> T:
        """What `read` gives; its InvalidInput is noted instead of raised."""
        try:
            return read()
        except InvalidInput as error:
            self.refusals.append(error)
            return otherwise


def check_keys(
    content: Mapping[str, Any],
    fields: Mapping[str, Field],
    found: Found,
    *,
    file: str,
    prefix: str = "",
) -> None:
    """Note every unknown and every refused key of a table, and of the tables in it.

    fields: by dotted name; `a.b` says that `a` is a table, `a[].b` that it is a list of tables, and
    `a.*` that the author may write other keys into it as well.
    """
    for key, value in content.items():
        name = prefix + str(key)
        field = fields.get(name)
        if field is None:
            if f"{prefix}*" not in fields or str(key).startswith("muster_"):
                _note_unknown(name, prefix, fields, found, file)
            continue
        if field.use == "refused" and value not in _NOTHING:
            found.refuse(name, field.why, field.way_out)
        elif field.use == "no effect" and value not in _NOTHING:
            found.remark(name, field.why)
        if field.use == "refused":
            continue
        for inner, below in _tables(name, value, fields, found):
            check_keys(inner, fields, found, file=file, prefix=below)


def _tables(
    name: str, value: object, fields: Mapping[str, Field], found: Found
) -> Iterator[tuple[Mapping[str, Any], str]]:
    if any(known.startswith(f"{name}.") for known in fields):
        if isinstance(value, dict):
            yield value, f"{name}."
        elif value is not None:
            found.refuse(name, "has to be a table", f"write [{name}]")
    elif any(known.startswith(f"{name}[].") for known in fields):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield one, f"{name}[]."
            else:
                found.refuse(name, "has to be a list of tables", f"write [[{name}]]")


def _note_unknown(
    name: str, prefix: str, fields: Mapping[str, Field], found: Found, file: str
) -> None:
    here = {
        known[len(prefix) :]
        for known in fields
        if known.startswith(prefix) and not set(".[*") & set(known[len(prefix) :])
    }
    key = name[len(prefix) :]
    near = difflib.get_close_matches(key, sorted(here), n=1, cutoff=0.5)
    way_out = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(here))}"
    found.refuse(name, f"unknown key in {file}", way_out)


class Table:
    """One table, read key by key."""

    def __init__(self, content: object, name: str, found: Found):
        self._content: Mapping[str, Any] = content if isinstance(content, dict) else {}
        self._name, self._found = name, found

    def raw(self, key: str) -> Any:
        """The value as it stands, unchecked; None when absent."""
        return self._content.get(key)

    def refuse(self, key: str, problem: str, way_out: str) -> None:
        """Note that the value of `key` cannot be honoured."""
        self._found.refuse(f"{self._name}.{key}" if self._name else key, problem, way_out)

    def number(self, key: str, *, top: float = SECONDS_MAX) -> float | None:
        """A number above 0 and up to `top`."""
        value = self.raw(key)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value <= top:
            problem = f"{value!r} is not a number above 0 and up to {top:.10g}"
            self.refuse(key, problem, "write such a number")
            return None
        return float(value)

    def whole(self, key: str, *, top: int) -> int | None:
        """The same, without a fraction."""
        value = self.number(key, top=top)
        if value is not None and value != int(value):
            self.refuse(key, f"{value!r} is not a whole number", "write a whole number")
            return None
        return None if value is None else int(value)

    def text(self, key: str) -> str | None:
        """A text."""
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, f"{value!r} is not text", "put it in quotes")
            return None
        return value

    def choice(self, key: str, known: tuple[str, ...]) -> str | None:
        """One of these texts."""
        value = self.raw(key)
        if value is not None and value not in known:
            self.refuse(key, f"{value!r} is not one of these", f"write one of {', '.join(known)}")
            return None
        return value if isinstance(value, str) else None

    def env(self, key: str = "env") -> tuple[tuple[str, str], ...]:
        """Variables by name. `${NAME:-x}` stands for x: the host's variables are never given."""
        content = self.raw(key)
        if content is None:
            return ()
        if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
            self.refuse(key, "has to be a table of texts", 'write env = {NAME = "value"}')
            return ()
        filled: list[tuple[str, str]] = []
        for name, value in sorted(content.items()):
            plain = without_host_variables(value)
            if plain is None:
                problem = "a value from the host's environment is never given to a box"
                self.refuse(f"{key}.{name}", problem, "write the value itself, or ${NAME:-value}")
            elif not re.match(r"[A-Za-z_]\w*\Z", name, re.ASCII) or "\0" in plain:
                self.refuse(f"{key}.{name}", "not a variable", "use letters, digits and _")
            else:
                filled.append((name, plain))
        return tuple(filled)


def without_host_variables(value: str) -> str | None:
    """The text with each `${NAME:-x}` as x; None when one has no such default."""
    plain = _HOST_VARIABLE.sub(lambda match: match.group(1), value)
    return None if "${" in plain else plain
