"""Read the small part of a Dockerfile that a native box can follow.

Owns: the grammar of FROM, WORKDIR, ENV, COPY, RUN and USER root. Promise: pure; what is read is
meant as Docker means it; what only an image builder can do is told by its line (`unbuildable`),
what no builder could read is refused, and nothing is skipped but what changes nothing in a box.
Does not cover: running the steps (the sandbox does), what image `FROM` names (its bases).
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import posixpath
import re
import shlex
from collections.abc import Collection, Mapping

import msgspec

from muster import fetching
from muster.errors import InvalidInput
from muster.types import Value

SUPPORTED = "FROM (one stage), WORKDIR, ENV, COPY (files beside it), RUN and USER root"
FILE = "environment/Dockerfile"
STEPS_MAX = 256
# Of an image that is started, not of its files: in a box nothing starts but the agent's commands.
INERT = ("EXPOSE", "LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "STOPSIGNAL")
BUILDER_ONLY = ("ADD", "ARG", "HEALTHCHECK", "ONBUILD", "SHELL", "VOLUME")

_SHOWN = 80
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_ENV_NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
_COPY_FLAG = re.compile(r"--(chmod|chown)=(\S+)\Z")
_HERE = re.compile(r"(^|\s)<<-?[\"']?[A-Za-z_]")
_ESCAPE = re.compile(r"#\s*escape\s*=", re.IGNORECASE)
_TOLD_MAX = 4  # lines of one file that only an image builder can follow
_WITH_A_BUILDER = (
    "start a sandbox host with sandbox.backend = docker, or write the Dockerfile with FROM, "
    "WORKDIR, ENV, COPY, RUN and USER only"
)


class SetWorkdir(Value, frozen=True, tag=True):
    """Make this absolute path, if absent, and work there from now on."""

    path: str


class SetEnv(Value, frozen=True, tag=True):
    """Export one variable to the later steps and to every command of the box."""

    name: str
    value: str


class CopyFiles(Value, frozen=True, tag=True):
    """Copy `src` (beside the Dockerfile, may hold `*`) to the absolute `dst`; see `copied`."""

    src: str
    dst: str  # a trailing "/" says: into this folder
    mode: int | None = None  # of each file; None keeps its own


class RunCommand(Value, frozen=True, tag=True):
    """Run with `/bin/sh -c`; an exit code other than 0 fails the build."""

    command: str


BuildStep = SetWorkdir | SetEnv | CopyFiles | RunCommand


class Recipe(Value, frozen=True):
    """A whole Dockerfile: the image it names and its steps in order.

    workdir: the last WORKDIR; `/` without one, as in Docker. unbuildable: "FILE line N: why (line)"
    of the lines that only an image builder can follow; there are no steps then, and base and
    workdir are what can be seen. inert: "line N: INSTRUCTION", those that change nothing in a box.
    lines: of each step, the line that its instruction begins in.
    """

    base: str
    steps: tuple[BuildStep, ...]
    workdir: str = "/"
    unbuildable: str = ""
    inert: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()


class _Malformed(Exception):
    """No builder could read this line."""


class _BuilderOnly(Exception):
    """This line is right, and a native box cannot follow it."""


class _Unexpanded(_BuilderOnly):
    """It names a variable that is not known here."""


def parse(text: str, file: str = FILE) -> Recipe:
    """The recipe in `text`; InvalidInput names the line of `file` that no builder could read."""
    recipe, refusals = examine(text, file)
    if refusals:
        raise refusals[0]
    return recipe


def examine(text: str, file: str = FILE) -> tuple[Recipe, list[InvalidInput]]:
    """The recipe, and each line that no builder could read.

    Behind a line that only a builder can follow nothing is refused: what it means is not known.
    """
    reader, inert, only = _Reader(), list[str](), list[str]()
    refusals: list[InvalidInput] = []
    numbers: list[int] = []
    lines = _logical_lines(text)
    for number, line in lines:
        try:
            if not reader.read(line):
                inert.append(f"line {number}: {line.partition(' ')[0].upper()}")
        except _BuilderOnly as why:
            if not only or not isinstance(why, _Unexpanded):
                shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
                only.append(f"line {number}: {why} ({shown})")
        except _Malformed as bad:
            if not only:
                refusals.append(_unreadable(str(bad), f"{file} line {number}", line))
            if not reader.base:
                break
        numbers += [number] * (len(reader.steps) - len(numbers))
    if only:
        base, workdir = _seen(lines)
        return Recipe(base, (), workdir, f"{file} {'; '.join(only[:_TOLD_MAX])}"), refusals
    if not reader.base and not refusals:
        refusals.append(_unreadable("a Dockerfile starts with FROM", f"{file} line 1", ""))
    steps = tuple(reader.steps)
    return Recipe(reader.base, steps, reader.workdir, "", tuple(inert), tuple(numbers)), refusals


def way_out(unbuildable: str) -> str:
    """What to do about a Recipe.unbuildable where no image builder is, or none would help."""
    if fetching.NEEDS_NETWORK in unbuildable:  # an image builder has no network either
        return fetching.INTO_A_BASE
    return _WITH_A_BUILDER


def run_lines(text: str) -> list[int]:
    """The line that each RUN of a Dockerfile begins in, in order."""
    return [number for number, line in _logical_lines(text) if line[:4].upper() == "RUN "]


def _unreadable(problem: str, field: str, line: str) -> InvalidInput:
    supported = f"supported are {SUPPORTED}"
    return InvalidInput(problem, field=field, value=line[: _SHOWN * 2], way_out=supported)


def copied(step: CopyFiles, files: Collection[str]) -> list[tuple[str, str]]:
    """Pairs (path below the Dockerfile's folder, absolute target) that a COPY stands for, sorted.

    `files` are the paths of all files below that folder. A folder's *content* is copied, as
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
            f"COPY finds no such file beside the Dockerfile: {step.src}",
            field=FILE,
            value=step.src,
            way_out="add it (tests and solutions never count), or remove the line",
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
        self.workdir = "/"
        self._env: dict[str, str] = {}

    def read(self, line: str) -> bool:
        """Take the next instruction; False when it changes nothing in a box."""
        if _ESCAPE.match(line):
            raise _BuilderOnly("another escape character is not supported")
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        readers = {
            "FROM": self._from,
            "WORKDIR": self._set_workdir,
            "ENV": self._set_env,
            "COPY": self._copy,
            "RUN": self._run,
            "USER": self._user,
        }
        if word not in readers:
            return self._other(word, (*readers, *BUILDER_ONLY, *INERT))
        if not self.base and word != "FROM":
            raise _Malformed("the first instruction has to be FROM")
        if not rest:
            raise _Malformed(f"{word} has no argument")
        if word in ("RUN", "COPY") and _HERE.search(rest):
            raise _BuilderOnly("here-documents are not supported")
        readers[word](rest)
        if len(self.steps) > STEPS_MAX:
            raise _Malformed(f"more than {STEPS_MAX} steps")
        return True

    def _other(self, word: str, known: tuple[str, ...]) -> bool:
        if word in BUILDER_ONLY:
            raise _BuilderOnly(f"{word} is not supported")
        if word not in INERT:
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise _Malformed(f"{word} is no instruction of a Dockerfile{hint}")
        return False

    def _from(self, rest: str) -> None:
        words = rest.split()
        named = len(words) == 3 and words[1].upper() == "AS"
        if self.base or "$" in rest or words[0].startswith("--") or not (len(words) == 1 or named):
            raise _BuilderOnly("only one plain FROM is supported")
        self.base = words[0]

    def _set_workdir(self, rest: str) -> None:
        self.workdir = self._absolute(_expand(rest.strip("\"'"), self._env))
        self.steps.append(SetWorkdir(self.workdir))

    def _set_env(self, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise _Malformed(f"ENV cannot be read: {error}") from None
        if "=" not in words[0]:  # the old form: ENV NAME all the rest
            name, _, value = rest.partition(" ")
            words = [f"{name}={value.strip()}"]
        before = dict(self._env)  # one ENV sees only the variables of earlier lines
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not _ENV_NAME.match(name):
                raise _Malformed("ENV wants NAME=value")
            self._env[name] = _expand(value, before)
            self.steps.append(SetEnv(name, self._env[name]))

    def _copy(self, rest: str) -> None:
        flags, rest = _split_flags(rest)
        mode = _copy_mode(flags)
        words = _json_words(rest) or rest.split()
        if len(words) < 2:
            raise _Malformed("COPY wants a source and a destination")
        *sources, target = (_expand(word, self._env) for word in words)
        dst = self._absolute(target)
        many = len(sources) > 1 or any("*" in source or "?" in source for source in sources)
        folders = {"/"} | {step.path for step in self.steps if isinstance(step, SetWorkdir)}
        if target.endswith(("/", "/.")) or many or dst in folders:
            dst = dst.rstrip("/") + "/"
        for source in sources:
            if ".." in source.split("/"):
                raise _Malformed("COPY takes files beside the Dockerfile, or below, only")
            self.steps.append(CopyFiles(source, dst, mode))

    def _run(self, rest: str) -> None:
        if rest.startswith("--"):
            raise _BuilderOnly("RUN takes no flags here")
        if fetching.installs(rest):
            raise _BuilderOnly(fetching.NEEDS_NETWORK)
        words = _json_words(rest)
        self.steps.append(RunCommand(shlex.join(words) if words else rest))

    def _user(self, rest: str) -> None:
        if rest not in ("root", "0", "root:root", "0:0"):
            raise _BuilderOnly("a native box has the user root only")

    def _absolute(self, path: str) -> str:
        return posixpath.normpath("/" + posixpath.join(self.workdir, path).lstrip("/"))


def _seen(lines: list[tuple[int, str]]) -> tuple[str, str]:
    """Image and folder of the last stage, without what is only known while building."""
    base, workdir = "", "/"
    for _, line in lines:
        words = [word for word in line.split() if not word.startswith("--")]
        if len(words) < 2 or "$" in words[1]:
            continue
        if words[0].upper() == "FROM":
            base, workdir = words[1], "/"
        elif words[0].upper() == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, words[1].strip("\"'")))
    return base, workdir


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Instructions with their first line's number; comments gone, continuations joined."""
    lines: list[tuple[int, str]] = []
    held, start = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if _ESCAPE.match(line):
            lines.append((number, line))
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


def _copy_mode(flags: list[str]) -> int | None:
    mode = None
    for flag in flags:
        known = _COPY_FLAG.match(flag)
        if known is None:
            raise _BuilderOnly("COPY takes only --chmod and --chown=root here")
        name, value = known.groups()
        if name == "chown" and value not in ("root", "0", "root:root", "0:0"):
            raise _BuilderOnly("a native box has the user root only")
        if name == "chmod":
            if not re.match(r"0?[0-7]{3}\Z", value):
                raise _BuilderOnly("--chmod wants three octal digits")
            mode = int(value, 8)
    return mode


def _json_words(rest: str) -> list[str]:
    """The words of the JSON form; empty when `rest` is not in that form."""
    if not rest.startswith("["):
        return []
    try:
        return msgspec.convert(json.loads(rest), list[str])
    except ValueError:
        raise _Malformed("the list form wants JSON strings") from None


def _expand(text: str, env: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in env:
            raise _Unexpanded(f"${name} is not set by an earlier ENV")
        return env[name]

    expanded = _VARIABLE.sub(value, text)
    if "$" in _VARIABLE.sub("", text):
        raise _Unexpanded("only $NAME and ${NAME} can be expanded")
    return expanded
