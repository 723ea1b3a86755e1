"""What an image says of the sessions in its boxes: folder, variables, user. Pure.

Promise: a box's session is the usual variables, over them those of the image, over them the task's;
a verifier's has those of the image's variables that lead to nothing an agent can write, below its
own. Does not cover: what steps leave to the next (shell.py).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from services.sandbox import environment
from services.sandbox.adapters.docker.shell import Session
from services.sandbox.adapters.docker.transfer import is_code

_PIECE = re.compile(r"[\s:;,=]+")
# What makes programs load code, or read settings, from where the variable says.
_STEERING = re.compile(
    r"(PYTHON(?!_)|LD_|GIT_|PERL5|RUBY|NODE_|BASH_|PYTEST|JAVA_TOOL|GCONV|XDG_|npm_)"
    r"|(ENV|CDPATH|CLASSPATH|SHELLOPTS|IFS|PROMPT_COMMAND|TMPDIR|HOME|EDITOR|PAGER)\Z"
)


def of_image(found: Mapping[str, Any]) -> Session:
    """What the engine tells of an image (`Config`), as the session that it asks for."""
    config = found.get("Config") or {}
    env = dict(pair.split("=", 1) for pair in config.get("Env") or [] if "=" in pair)
    return Session(config.get("WorkingDir") or "/", env)


def entered(image: Session, user: str, cwd: str, env: Mapping[str, str]) -> Session:
    """The session of a box from that image, with a task's folder (empty: the image's) and
    variables. user: whom the image's processes belong to; the usual HOME is root's."""
    usual = dict(environment.BASE_ENV)
    if user.partition(":")[0] not in ("", "0", "root"):
        del usual["HOME"], usual["USER"]
    return Session(cwd or image.cwd, usual | image.env | dict(env))


def of_verifier(image: Session, cwd: str, env: Mapping[str, str]) -> Session:
    """The same for its verifier; `env` counts over everything but an unchanged PATH, before which
    the image's comes."""
    kept = {name: value for name, value in image.env.items() if _is_harmless(name, value)}
    path = env.get("PATH", environment.VERIFIER_ENV["PATH"])
    if path == environment.VERIFIER_ENV["PATH"]:
        own = [folder for folder in image.env.get("PATH", "").split(":") if _is_trusted(folder)]
        path = ":".join(dict.fromkeys([*own, *path.split(":")]))
    return Session(cwd or image.cwd, kept | dict(env) | {"PATH": path})


def _is_harmless(name: str, value: str) -> bool:
    pieces = [piece for piece in _PIECE.split(value) if piece]
    if _STEERING.match(name):
        return all(_is_trusted(piece) for piece in pieces)
    return all(_is_trusted(piece) for piece in pieces if "/" in piece)


def _is_trusted(path: str) -> bool:
    """Whether it is the whole path of something that verifiers take from the image alone."""
    return len(path) > 1 and path[0] == "/" and path == posixpath.normpath(path) and is_code(path)
