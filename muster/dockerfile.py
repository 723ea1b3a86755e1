"""Read the small part of a Dockerfile that a native box can follow.

Owns: the grammar of FROM, WORKDIR, ENV, COPY, RUN and USER root. Promise: pure; what is read is
meant as Docker means it, and anything else is refused by line, never skipped.
Does not cover: running the steps (the sandbox does), building images (`FROM` is only recorded).
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
import shlex
from collections.abc import Collection, Mapping

import msgspec

from muster.errors import InvalidInput
from muster.types import Value

SUPPORTED = "FROM (one stage), WORKDIR, ENV, COPY (from environment/), RUN and USER root"
STEPS_MAX = 256

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_ENV_NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
_COPY_FLAG = re.compile(r"--(chmod|chown)=(\S+)\Z")


class SetWorkdir(Value, frozen=True, tag=True):
    """Make this absolute path, if absent, and work there from now on."""

    path: str


class SetEnv(Value, frozen=True, tag=True):
    """Export one variable to the later steps and to every command of the box."""

    name: str
    value: str


class CopyFiles(Value, frozen=True, tag=True):
    """Copy `src` (below environment/, may hold `*`) to the absolute `dst`; see `copied`."""

    src: str
    dst: str  # a trailing "/" says: into this folder
    mode: int | None = None  # of each file; None keeps its own


class RunCommand(Value, frozen=True, tag=True):
    """Run with `/bin/sh -c`; an exit code other than 0 fails the build."""

    command: str


BuildStep = SetWorkdir | SetEnv | CopyFiles | RunCommand


class Recipe(Value, frozen=True):
    """A whole Dockerfile: the image it names (not used) and its steps in order."""

    base: str
    steps: tuple[BuildStep, ...]

    @property
    def workdir(self) -> str:
        """The last WORKDIR; `/` without one, as in Docker."""
        paths = [step.path for step in self.steps if isinstance(step, SetWorkdir)]
        return paths[-1] if paths else "/"


def parse(text: str) -> Recipe:
    """The recipe in `text`; InvalidInput names the line and what is supported."""
    reader = _Reader()
    for number, line in _logical_lines(text):
        reader.read(number, line)
    if not reader.base:
        raise _refusal(1, "", "a Dockerfile starts with FROM")
    return Recipe(reader.base, tuple(reader.steps))


def copied(step: CopyFiles, files: Collection[str]) -> list[tuple[str, str]]:
    """Pairs (path below environment/, absolute target) that a COPY stands for, sorted.

    `files` are the paths of all files below environment/. A folder's *content* is copied, as
    Docker does. InvalidInput when nothing matches.
    """
    pattern = posixpath.normpath(step.src.lstrip("/") or ".")
    into = step.dst.endswith("/")
    pairs: list[tuple[str, str]] = []
    for path in sorted(files):
        if pattern == "." or path.startswith(pattern + "/"):
            rest = path if pattern == "." else path[len(pattern) + 1 :]
            pairs.append((path, posixpath.join(step.dst, rest)))
        elif path == pattern:
            pairs.append((path, step.dst + posixpath.basename(path) if into else step.dst))
        elif "*" in pattern or "?" in pattern:
            pairs += _globbed(pattern, path, step.dst)
    if not pairs:
        raise InvalidInput(
            "COPY finds no such file below environment/",
            field="environment/Dockerfile",
            value=step.src,
            way_out="add the file to the task's environment folder, or remove the line",
        )
    return pairs


def _globbed(pattern: str, path: str, dst: str) -> list[tuple[str, str]]:
    depth = pattern.count("/") + 1
    parts = path.split("/")
    head = "/".join(parts[:depth])
    if len(parts) < depth or not all(
        fnmatch.fnmatchcase(part, wanted)
        for part, wanted in zip(parts, pattern.split("/"), strict=False)
    ):
        return []
    rest = parts[depth:] or [posixpath.basename(head)]
    return [(path, posixpath.join(dst, *rest))]


class _Reader:
    """Collects steps; knows the working directory and variables so far."""

    def __init__(self) -> None:
        self.base = ""
        self.steps: list[BuildStep] = []
        self._workdir = "/"
        self._env: dict[str, str] = {}

    def read(self, number: int, line: str) -> None:
        word, _, rest = line.partition(" ")
        readers = {
            "FROM": self._from,
            "WORKDIR": self._set_workdir,
            "ENV": self._set_env,
            "COPY": self._copy,
            "RUN": self._run,
            "USER": self._user,
        }
        reader = readers.get(word.upper())
        if reader is None:
            raise _refusal(number, line, f"{word.upper()} is not supported")
        if not self.base and word.upper() != "FROM":
            raise _refusal(number, line, "the first instruction has to be FROM")
        if not rest.strip():
            raise _refusal(number, line, f"{word.upper()} has no argument")
        if word.upper() in ("RUN", "COPY") and re.search(r"(^|\s)<<-?[\"']?[A-Za-z_]", rest):
            raise _refusal(number, line, "here-documents are not supported")
        reader(number, rest.strip())
        if len(self.steps) > STEPS_MAX:
            raise _refusal(number, line, f"more than {STEPS_MAX} steps")

    def _from(self, number: int, rest: str) -> None:
        words = rest.split()
        named = len(words) == 3 and words[1].upper() == "AS"
        if self.base or words[0].startswith("--") or not (len(words) == 1 or named):
            raise _refusal(number, rest, "only one plain FROM is supported")
        self.base = words[0]

    def _set_workdir(self, number: int, rest: str) -> None:
        self._workdir = self._absolute(_expand(number, rest.strip("\"'"), self._env))
        self.steps.append(SetWorkdir(self._workdir))

    def _set_env(self, number: int, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise _refusal(number, rest, f"ENV cannot be read: {error}") from None
        if "=" not in words[0]:  # the old form: ENV NAME all the rest
            name, _, value = rest.partition(" ")
            words = [f"{name}={value.strip()}"]
        before = dict(self._env)  # one ENV sees only the variables of earlier lines
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not _ENV_NAME.match(name):
                raise _refusal(number, rest, "ENV wants NAME=value")
            self._env[name] = _expand(number, value, before)
            self.steps.append(SetEnv(name, self._env[name]))

    def _copy(self, number: int, rest: str) -> None:
        flags, rest = _split_flags(rest)
        mode = _copy_mode(number, flags)
        words = _json_words(number, rest) or rest.split()
        if len(words) < 2:
            raise _refusal(number, rest, "COPY wants a source and a destination")
        *sources, target = (_expand(number, word, self._env) for word in words)
        dst = self._absolute(target)
        many = len(sources) > 1 or any("*" in source or "?" in source for source in sources)
        folders = {"/"} | {step.path for step in self.steps if isinstance(step, SetWorkdir)}
        if target.endswith(("/", "/.")) or many or dst in folders:
            dst = dst.rstrip("/") + "/"
        for source in sources:
            if ".." in source.split("/"):
                raise _refusal(number, rest, "COPY takes files below environment/ only")
            self.steps.append(CopyFiles(source, dst, mode))

    def _run(self, number: int, rest: str) -> None:
        if rest.startswith("--"):
            raise _refusal(number, rest, "RUN takes no flags here")
        words = _json_words(number, rest)
        self.steps.append(RunCommand(shlex.join(words) if words else rest))

    def _user(self, number: int, rest: str) -> None:
        if rest not in ("root", "0", "root:root", "0:0"):
            raise _refusal(number, rest, "a box has the user root only")

    def _absolute(self, path: str) -> str:
        return posixpath.normpath("/" + posixpath.join(self._workdir, path).lstrip("/"))


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Instructions with their first line's number; comments gone, continuations joined."""
    lines: list[tuple[int, str]] = []
    held, start = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if re.match(r"#\s*escape\s*=", line, re.IGNORECASE):
            raise _refusal(number, line, "another escape character is not supported")
        if line.startswith("#") or (not line and held):
            continue
        start = start if held else number
        if line.endswith("\\"):
            held += line[:-1]
            continue
        if held or line:
            lines.append((start, re.sub(r"\A(\S+)\s+", r"\1 ", held + line)))
        held = ""
    if held:
        lines.append((start, held.strip()))
    return lines


def _split_flags(rest: str) -> tuple[list[str], str]:
    flags = []
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        flags.append(flag)
        rest = rest.lstrip()
    return flags, rest


def _copy_mode(number: int, flags: list[str]) -> int | None:
    mode = None
    for flag in flags:
        known = _COPY_FLAG.match(flag)
        if known is None:
            raise _refusal(number, flag, "COPY takes only --chmod and --chown=root here")
        name, value = known.groups()
        if name == "chown" and value not in ("root", "0", "root:root", "0:0"):
            raise _refusal(number, flag, "a box has the user root only")
        if name == "chmod":
            if not re.match(r"0?[0-7]{3}\Z", value):
                raise _refusal(number, flag, "--chmod wants three octal digits")
            mode = int(value, 8)
    return mode


def _json_words(number: int, rest: str) -> list[str]:
    """The words of the JSON form; empty when `rest` is not in that form."""
    if not rest.startswith("["):
        return []
    try:
        return msgspec.convert(json.loads(rest), list[str])
    except ValueError:
        raise _refusal(number, rest, "the list form wants JSON strings") from None


def _expand(number: int, text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in env:
            raise _refusal(number, text, f"${name} is not set by an earlier ENV")
        return env[name]

    expanded = _VARIABLE.sub(value, text)
    if "$" in _VARIABLE.sub("", text):
        raise _refusal(number, text, "only $NAME and ${NAME} can be expanded")
    return expanded


def _refusal(number: int, line: str, problem: str) -> InvalidInput:
    return InvalidInput(
        problem,
        field=f"environment/Dockerfile line {number}",
        value=line[:120],
        way_out=f"supported are {SUPPORTED}",
    )
