"""A task's whole Dockerfile, built by the engine.

Promise: nothing is fetched: an image that a FROM or a COPY --from names is one that this host
knows, by the bases of the configuration, and is written into the line by its id; an ADD of an
address is refused; commands run without a network. What the author got wrong is InvalidInput with
the engine's words about the line; trouble of the engine is EngineTrouble. A VOLUME is refused: its
files would be neither in a snapshot nor before a verifier. Stages that the engine keeps as its
build cache are its own to prune. Does not cover: naming (backend.py).
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable
from typing import Any

from muster.archive import TaskFile
from muster.errors import Exhausted, InvalidInput
from muster.types import Limits
from services.sandbox.adapters.docker.engine import Engine, EngineTrouble, Labels, Told

_FROM = re.compile(r"(\s*FROM\s+(?:--platform=\S+\s+)?)(\S+)(\s+AS\s+(\S+))?\s*\Z", re.IGNORECASE)
_MAY_FETCH = re.compile(r"\s*(?:ONBUILD\s+)?(ADD|COPY)\s", re.IGNORECASE)
_COPY_FROM = re.compile(r"(\s*(?:ONBUILD\s+)?COPY\s.*?--from=)(\S+)(.*)\Z", re.IGNORECASE)
_FETCHED = re.compile(r"://|\bgit@|\$")
# What the engine says of a line that its author has to mend; everything else is its own trouble.
_AUTHORS = re.compile(
    r"returned a non-zero code|parse error|unknown (instruction|flag)|requires (at least|exactly)"
    r"|invalid (reference format|from flag)|failed to process|syntax error"
    r"|(COPY|ADD) failed: (file not found|forbidden path|no source files|stat )"
    r"|exec: .*(no such file|not found|permission denied)|unable to find user",
    re.IGNORECASE,
)
_STEP = re.compile(r"Step \d+/\d+ : (?:RUN )?")
_DOCKERFILE = "Dockerfile"
_FIELD = "environment/Dockerfile"
_SHOWN = 1500  # characters of a failed build


async def build(
    engine: Engine, name: str, context: dict[str, TaskFile], resolve: Callable[[str], str],
    labels: Labels, limits: Limits, timeout_s: float,
) -> str:  # fmt: skip
    """The id of the image built. resolve: an image as FROM names it → one that the engine has."""
    files = {path.removeprefix("environment/"): file for path, file in context.items()}
    if _DOCKERFILE not in files:
        raise _refusal("the task has no environment/Dockerfile", "", "add one")
    text = files[_DOCKERFILE].data.decode("utf-8", "replace")
    files[_DOCKERFILE] = TaskFile(0o644, with_known_bases(text, resolve).encode())
    try:
        told = await engine.build(_packed(files), _params(name, labels, limits), timeout_s)
    except EngineTrouble as trouble:
        if isinstance(trouble.__cause__, TimeoutError):
            raise Exhausted(
                "the task's Dockerfile took too long to build",
                field=_FIELD,
                value=f"{timeout_s:g} s",
                way_out="make it quicker, or raise sandbox.setup_timeout_s",
            ) from trouble
        if trouble.status == 400:  # it does not read as a Dockerfile
            raise _refusal(str(trouble)[:_SHOWN], "", "mend the line") from trouble
        raise
    if told.error:
        raise failure(told)
    return await _checked(engine, name)


def with_known_bases(text: str, resolve: Callable[[str], str]) -> str:
    """The Dockerfile with each image that a FROM names replaced; pure but for `resolve`."""
    stages: set[str] = set()
    lines = []
    for line in text.split("\n"):
        found = _FROM.match(line)
        if found:
            image = found[2]
            if "$" in image:
                raise _refusal("an image named by a variable", line.strip(), "name it outright")
            if image.lower() not in stages:
                line = f"{found[1]}{resolve(image)}{found[3] or ''}"
            if found[4]:
                stages.add(found[4].lower())
        lines.append(_with_known_source(line, stages, resolve))
    _check_fetches(text)
    return "\n".join(lines)


def _with_known_source(line: str, stages: set[str], resolve: Callable[[str], str]) -> str:
    """A COPY --from, which the engine would pull an image for."""
    found = _COPY_FROM.match(line)
    if not found or found[2].isdecimal() or found[2].lower() in stages:
        return line
    if "$" in found[2]:
        raise _refusal("an image named by a variable", line.strip(), "name it outright")
    return f"{found[1]}{resolve(found[2])}{found[3]}"


def _check_fetches(text: str) -> None:
    """The engine itself would fetch an address, past the network that commands lack."""
    instruction = ""
    for line in text.split("\n"):
        first = not instruction
        found = _MAY_FETCH.match(line) if first else None
        instruction = instruction or (found[1].upper() if found else "RUN")
        if instruction == "ADD" and _FETCHED.search(line):
            raise _refusal(
                "ADD of an address, or of what a variable names", line.strip(),
                "put the file into environment/ and name it",
            )  # fmt: skip
        if instruction == "COPY" and not first and "--from" in line:
            raise _refusal("COPY --from over two lines", line.strip(), "write it on one line")
        if not line.rstrip().endswith(("\\", "`")):
            instruction = ""


def _params(name: str, labels: Labels, limits: Limits) -> dict[str, Any]:
    return {
        "t": name,
        "networkmode": "none",
        "forcerm": True,
        "rm": True,
        "labels": json.dumps(labels),
        "memory": limits.memory_bytes,
        "memswap": limits.memory_bytes,
    } | ({"cpuperiod": 100_000, "cpuquota": int(limits.cpus * 1e5)} if limits.cpus else {})


async def _checked(engine: Engine, name: str) -> str:
    image = await engine.image(name)
    if image is None:
        raise EngineTrouble(f"the engine built {name} but does not have it")
    if (image.get("Config") or {}).get("Volumes"):
        await engine.remove_image(name)
        raise _refusal("VOLUME cannot be followed", "VOLUME", "remove the line: files stay anyway")
    return str(image["Id"])


def failure(told: Told) -> InvalidInput | EngineTrouble:
    """Of a build that ended with an error."""
    steps = [line for line in told.lines if line.startswith("Step ")]
    said = "".join(told.lines)[-_SHOWN:].strip()
    if not _AUTHORS.search(told.error) or "no space left" in told.error:
        return EngineTrouble(f"building a task's Dockerfile: {told.error[:_SHOWN]}")
    return _refusal(
        f"the task's Dockerfile does not build: {told.error}\n{said}",
        _STEP.sub("", steps[-1]).strip() if steps else "",
        "mend the line: nothing can be fetched, and images are those of this host",
    )


def _packed(files: dict[str, TaskFile]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, file in sorted(files.items()):
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(file.data), file.mode
            archive.addfile(info, io.BytesIO(file.data))
    return sink.getvalue()


def _refusal(problem: str, value: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field=_FIELD, value=value[:200], way_out=way_out)
