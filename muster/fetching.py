"""Which commands of a Dockerfile fetch from a network, and what to do instead. Pure.

Promise: a package manager of the system (`installs`) is known for certain; what else looks like a
fetch (`fetches`) may be something else, so it is remarked on and never refused. Does not cover:
whether what they fetch is there already.
"""

from __future__ import annotations

import re

NEEDS_NETWORK = "packages come from a network, which no box has"
NO_NETWORK = "boxes have no network"
INTO_A_BASE = (
    "put it into the base and remove the line: a root file system that has it, named in "
    "sandbox.bases of the host and in FROM (docs/SANDBOX.md, Bases)"
)
COPY_IT = "put it into a base (docs/SANDBOX.md, Bases), or beside the Dockerfile and COPY it"

_INSTALLS = re.compile(r"\b(apt-get|apt|apk|dnf|yum)(\s+-\S+)*\s+(update|install|add|upgrade)\b")
_FETCHES = re.compile(
    r"\b(?:(pip3?|uv|pipx|npm|yarn|pnpm|cargo|gem|go|conda|mamba|poetry)\s+(?:-\S+\s+)*"
    r"(?:pip\s+|tool\s+)?(?:install|add|sync|ci|get|download)\b"
    r"|(curl|wget)\s[^|;&]*(?:https?|ftp)://"
    r"|(git)\s+clone\s[^|;&]*(?:(?:https?|git|ssh)://|git@)"
    r"|(uvx|npx)\s+\S)"
)
_LOCAL = re.compile(r"--no-index\b|--offline\b|https?://(?:localhost|127\.0\.0\.1)\b")
# How a tool says that it found no network.
_SIGNS = re.compile(
    r"temporary failure in name resolution|could not resolve|name or service not known"
    r"|network is unreachable|no address associated|failed to establish a new connection"
    r"|no matching distribution found|dns error|unable to resolve host|EAI_AGAIN",
    re.IGNORECASE,
)


def installs(command: str) -> bool:
    """Whether a package manager of the system must fetch; `|| true` says that it may fail."""
    return bool(_INSTALLS.search(command)) and "|| true" not in command


def fetches(command: str) -> str:
    """The tool in `command` that seems to fetch from a network; empty when none does."""
    if found := _INSTALLS.search(command):
        return found[1]
    found = None if _LOCAL.search(command) else _FETCHES.search(command)
    return next((name for name in found.groups() if name), "") if found else ""


def missed(output: str) -> bool:
    """Whether a program's output tells that it looked for a network."""
    return bool(_SIGNS.search(output))
