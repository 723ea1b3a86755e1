"""What every backend says of copies that cannot be. Pure."""

from __future__ import annotations

from typing import NoReturn

from muster.errors import InvalidInput


def refuse(path: str, why: str) -> NoReturn:
    """To the caller."""
    raise InvalidInput(
        f"cannot be copied: it {why}",
        field="path",
        value=path,
        way_out="copy plain files, folders and links that stay within the copied folder, "
        "in smaller parts if it is too much",
    )
