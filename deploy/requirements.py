"""Print what `pip install` needs for an extra of pyproject.toml, without the project itself.

Images install these first, in a layer of their own that stays cached while only code changes; the
wheelhouse is made of the same list. Standard library only: it runs in a bare Python.

    python3 deploy/requirements.py [EXTRA …]
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

OWN = "muster-rl["


def wanted(project: dict[str, object], extras: list[str]) -> list[str]:
    """Requirements of the project and of `extras`, each once; extras that name others follow them.

    Raises KeyError for an extra that there is not.
    """
    groups: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    found: dict[str, None] = dict.fromkeys(project["dependencies"])  # type: ignore[call-overload]
    reach = list(extras)
    for extra in reach:  # grows while it is read
        for line in groups[extra]:
            if line.startswith(OWN):
                reach += [name for name in line[len(OWN) : -1].split(",") if name not in reach]
            else:
                found[line] = None
    return list(found)


if __name__ == "__main__":
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text("utf-8")
    print("\n".join(wanted(tomllib.loads(text)["project"], sys.argv[1:])))  # noqa: T201
