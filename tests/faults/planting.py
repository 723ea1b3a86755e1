"""Bugs planted in memory: one function of the code under test, with a piece of its text replaced.

Owns: what a planted bug is, planting it, taking it out again. Promise: the text to be replaced
stands exactly once in that function, or planting is refused; afterwards everything is as before.
Does not cover: which bugs (plants.py), the hunt (planted.py), bugs as patches of files, which need
tests to see them (mutants.py).
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from muster.types import Value

_TEXT = "planted_text"


class Edit(Value, frozen=True):
    """In the function `where` (module:name or module:Class.name), `old` becomes `new`."""

    where: str
    old: str
    new: str


class Bug(Value, frozen=True):
    """`caught`: a pattern of what may see it; `model` names a model of sim.models."""

    name: str
    what: str
    edits: tuple[Edit, ...]
    caught: str
    model: str = "ROUGH"


def source(where: str) -> str:
    """Text of a function as it stands, its indentation taken away."""
    _, _, found = _found(where)
    plain = _plain(found)
    planted_text: str | None = getattr(plain, _TEXT, None)  # of an edit before this one
    return planted_text or textwrap.dedent(inspect.getsource(plain))


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The bug is there. Raises ValueError when it does not fit the code any more."""
    with ExitStack() as stack:
        for edit in bug.edits:
            stack.enter_context(_edited(edit))
        yield


@contextmanager
def _edited(edit: Edit) -> Iterator[None]:
    owner, name, before = _found(edit.where)
    text = source(edit.where)
    if text.count(edit.old) != 1:
        raise ValueError(f"{edit.where} has {text.count(edit.old)} times: {edit.old}")
    text = text.replace(edit.old, edit.new)
    changed = compile(text, edit.where, "exec", __future__.annotations.compiler_flag)
    found: dict[str, Any] = {}
    exec(changed, _plain(before).__globals__, found)
    after = found[_plain(before).__name__]
    setattr(_plain(after), _TEXT, text)
    holders = [owner]
    if inspect.ismodule(owner):  # whoever imported it by name has it too
        # Not by getattr: lazy modules import what is asked of them.
        holders = [m for m in [*sys.modules.values()] if _own(m).get(name) is before]
    for holder in holders:
        setattr(holder, name, after)
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, name, before)


def _own(module: Any) -> dict[str, Any]:
    """What a module has without being asked; what pretends to be one may have nothing."""
    found = getattr(module, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _found(where: str) -> tuple[Any, str, Any]:
    """Who has the function, under which name, and what stands there (a property as such)."""
    module_name, _, path = where.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name, inspect.getattr_static(owner, name)


def _plain(found: Any) -> Any:
    """The function behind a property or a static method."""
    if isinstance(found, property):
        return found.fget
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found
