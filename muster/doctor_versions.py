"""Which packages an extra of Muster needs, and whether one that is there fits.

Pure. Promise: the two kinds of bounds that pyproject.toml uses (`>=`, `==`) are compared as
numbers; what it cannot read counts as fitting: a doctor must not cry wolf. Does not cover: markers
other than `extra`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?\s*([^;]*)(?:;\s*(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_OWN = "muster-rl"


def wanted(texts: Iterable[str], extras: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(package, bound) of the base install and these extras, from the metadata's lines."""
    known, told = set(extras), set()
    for text in texts:
        found = _REQUIREMENT.fullmatch(text.strip())
        if not found or found[1].lower() == _OWN:
            continue
        extra = _EXTRA.search(found[4] or "")
        if extra and extra[1] not in known:
            continue
        one = (found[1], found[3].strip())
        if one not in told:
            told.add(one)
            yield one


def fits(there: str, bound: str) -> bool:
    """Whether a version satisfies `>=X`, `==X` or several with commas."""
    for part in filter(None, (part.strip() for part in bound.split(","))):
        sign, text = part[:2], part[2:].strip()
        have, want = _numbers(there), _numbers(text)
        if not want or not have:
            continue
        if sign == ">=" and have < want:
            return False
        if sign == "==" and have[: len(want)] != want:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
