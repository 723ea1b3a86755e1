"""Fresh instances of one task: what its parameters are worth under a seed.

Owns: the grammar of `[metadata.muster_parameters]`, the draw, and `{{name}}` in a task's files.
Promise: an instance is a function of (task name, parameters, seed) alone, the same on every machine
and Python; what training can draw is never what a held-out seed draws, and the reverse. Nothing
of a task set is executed: a parameter is a list to choose from, a range, or one of a few
functions of earlier parameters. Does not cover: files and archives (taskset.py).
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from muster.errors import InvalidInput
from muster.types import Value

EVAL_SEEDS = 1_000_000  # seeds from here on are held out for evaluation
SEEDS_END = 1 << 31
PARAMETERS_MAX = 32
COUNT_MAX = 256
VALUE_BYTES_MAX = 64 << 10
_RANGE_MAX = 1_000_000
_ROUNDS = 1000  # draws tried until one lies on the wanted side of the split
_HELD_OUT_SHARE = 8  # one combination in so many is held out

Atom = int | str
Drawn = Atom | tuple[Atom, ...]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
_PLACE = re.compile(r"\{\{([a-z][a-z0-9_]{0,31})(?:\.(\d{1,3}))?\}\}")
# Short, plain, lower case: usable as a file name, and as a word that a shell leaves alone.
WORDS = tuple(
    """
    acorn amber anchor apple arrow autumn badge bamboo basil beacon berry birch blossom bottle
    branch breeze bridge bronze brook button cabin candle canyon carbon castle cedar cherry
    circle clover cobalt comet copper coral cotton cradle crystal daisy delta desert dragon
    eagle echo ember falcon feather fern fiddle flame flint forest garden garnet ginger glacier
    granite harbor hazel hollow honey indigo island ivory jacket jasper jungle kettle lagoon
    lantern laurel lemon lily linen lotus magnet maple marble meadow melon mirror mountain nectar
    needle nickel oasis olive onyx opal orchid otter oyster paper pebble pepper phoenix
    pigeon pillow planet plum pocket pollen poplar prairie prism quartz quiver rabbit raven ribbon
    river rocket saddle saffron salmon sapphire shadow silver sparrow spruce summer sunset temple
    thistle thunder tiger timber topaz tulip tunnel turtle valley velvet violet walnut whisper
    willow window winter yarrow zephyr
    """.split()
)  # fmt: skip
LISTS: Mapping[str, tuple[Atom, ...]] = {"words": WORDS}


class Choice(Value, frozen=True, tag=True):
    """One of `items`, or `count` of them (drawn between its two bounds)."""

    items: tuple[Atom, ...]
    count: tuple[int, int] | None = None
    distinct: bool = False


class Span(Value, frozen=True, tag=True):
    """A whole number from `low` to `high`, both included; or `count` of them."""

    low: int
    high: int
    count: tuple[int, int] | None = None
    distinct: bool = False


class Apply(Value, frozen=True, tag=True):
    """A function of earlier parameters, whose values are strung together."""

    function: str
    to: tuple[str, ...]
    equal: Atom | None = None  # of `count`
    by: str = " "  # of `join`


class Text(Value, frozen=True, tag=True):
    """Earlier parameters within a text."""

    text: str


Rule = Choice | Span | Apply | Text


class Parameter(Value, frozen=True):
    """One name and what it is worth."""

    name: str
    rule: Rule


def parse(table: object) -> tuple[Parameter, ...]:
    """The parameters of a task, in their order; InvalidInput names the one that is wrong."""
    if not isinstance(table, dict):
        _refuse("", "has to be a table", "write [metadata.muster_parameters]")
    if len(table) > PARAMETERS_MAX:
        _refuse("", f"more than {PARAMETERS_MAX} parameters", "use fewer")
    found: list[Parameter] = []
    for name, rule in table.items():
        if not _NAME.match(name):
            _refuse(name, "not a parameter's name", "use lower-case letters, digits and _")
        if not isinstance(rule, dict):
            _refuse(name, f"{rule!r} is not a rule", 'write { choice = ["a", "b"] }')
        found.append(Parameter(name, _rule(name, rule, [p.name for p in found])))
    return tuple(found)


def draw(task: str, parameters: Sequence[Parameter], seed: int) -> dict[str, Drawn]:
    """What each parameter is worth in the instance of that seed.

    Raises InvalidInput for a seed out of range, and when the parameters allow so few
    combinations that none lies on the seed's side of the split.
    """
    if not 0 <= seed < SEEDS_END:
        raise InvalidInput("not a seed", field="seed", value=seed, way_out=f"0 to {SEEDS_END - 1}")
    for again in range(_ROUNDS):
        values = _values(parameters, f"{task}\0{seed}\0{again}")
        if held_out(values) == (seed >= EVAL_SEEDS):
            return values
    _refuse("", f"too few different instances for seed {seed}", "give a parameter more values")


def held_out(values: Mapping[str, Drawn]) -> bool:
    """Whether this combination belongs to the evaluation."""
    digest = hashlib.sha256(msgspec.json.encode(sorted(values.items()))).digest()
    return digest[0] % _HELD_OUT_SHARE == 0


def render(text: str, values: Mapping[str, Drawn], where: str) -> str:
    """`text` with each `{{name}}` or `{{name.INDEX}}` replaced; a list gives a line per item."""

    def value(match: re.Match[str]) -> str:
        name, index = match[1], match[2]
        if name not in values:
            near = difflib.get_close_matches(name, list(values), n=1, cutoff=0.5)
            way_out = f"did you mean {near[0]!r}?" if near else "declare it as a parameter"
            _refuse(name, f"no such parameter, used in {where}", way_out)
        items = _items(values[name])
        if index is None:
            return "\n".join(map(str, items))
        if int(index) >= len(items):
            _refuse(name, f"has {len(items)} values, {where} asks for number {index}", "count on")
        return str(items[int(index)])

    return _PLACE.sub(value, text)


def mentions(text: str, parameters: Sequence[Parameter]) -> bool:
    """Whether a parameter is still unfilled in `text`."""
    names = {parameter.name for parameter in parameters}
    return any(match[1] in names for match in _PLACE.finditer(text))


# -- drawing ---------------------------------------------------------------------------


def _values(parameters: Sequence[Parameter], salt: str) -> dict[str, Drawn]:
    values: dict[str, Drawn] = {}
    for parameter in parameters:
        values[parameter.name] = worth = _worth(parameter, values, f"{salt}\0{parameter.name}")
        if sum(len(str(item)) for item in _items(worth)) > VALUE_BYTES_MAX:
            _refuse(parameter.name, f"over {VALUE_BYTES_MAX} bytes", "make it shorter")
    return values


def _worth(parameter: Parameter, values: Mapping[str, Drawn], salt: str) -> Drawn:
    match parameter.rule:
        case Choice(items, count, distinct):
            return _pick(items, count, distinct, salt)
        case Span(low, high, count, distinct):
            return _pick(range(low, high + 1), count, distinct, salt)
        case Text(text):
            return render(text, values, f"parameter {parameter.name}")
        case Apply() as apply:
            given = tuple(item for name in apply.to for item in _items(values[name]))
            try:
                return _FUNCTIONS[apply.function](given, apply)
            except (TypeError, ValueError) as error:
                _refuse(parameter.name, f"{apply.function}: {error}", "see docs/tasks.md")


def _pick(items: Sequence[Atom], count: tuple[int, int] | None, distinct: bool, salt: str) -> Drawn:
    if count is None:
        return items[_number(len(items), salt)]
    low, high = count
    wanted = low + _number(high - low + 1, f"{salt}\0count")
    taken: list[int] = []
    for k in range(wanted):
        if not distinct:
            taken.append(_number(len(items), f"{salt}\0{k}"))
            continue
        place = _number(len(items) - k, f"{salt}\0{k}")
        for former in sorted(taken):  # the place among those not yet taken
            place += former <= place
        taken.append(place)
    return tuple(items[place] for place in taken)


def _number(below: int, salt: str) -> int:
    """Even over 0 … below - 1: 256 bits for at most 20."""
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()) % below


def _items(value: Drawn) -> tuple[Atom, ...]:
    return value if isinstance(value, tuple) else (value,)


def _sorted(items: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """Numbers by size, anything else by code point."""
    if all(isinstance(item, int) for item in items):
        return tuple(sorted(items, key=int))
    return tuple(sorted(items, key=str))


def _whole(items: tuple[Atom, ...]) -> list[int]:
    if not items or not all(isinstance(item, int) for item in items):
        raise ValueError("needs whole numbers")
    return [int(item) for item in items]


def _count(items: tuple[Atom, ...], apply: Apply) -> int:
    return len(items) if apply.equal is None else items.count(apply.equal)


_FUNCTIONS: Mapping[str, Callable[[tuple[Atom, ...], Apply], Drawn]] = {
    "count": _count,
    "sum": lambda items, _: sum(_whole(items)),
    "product": lambda items, _: math.prod(_whole(items)),
    "min": lambda items, _: min(_whole(items)),
    "max": lambda items, _: max(_whole(items)),
    "sorted": lambda items, _: _sorted(items),
    "reversed": lambda items, _: items[::-1],
    "unique": lambda items, _: tuple(dict.fromkeys(items)),
    "first": lambda items, _: items[0] if items else "",
    "last": lambda items, _: items[-1] if items else "",
    "upper": lambda items, _: tuple(str(item).upper() for item in items),
    "backwards": lambda items, _: tuple(str(item)[::-1] for item in items),
    "length": lambda items, _: tuple(len(str(item)) for item in items),
    "join": lambda items, apply: apply.by.join(map(str, items)),
}


# -- reading ---------------------------------------------------------------------------

_KEYS = {
    "choice": {"count", "distinct"},
    "range": {"count", "distinct"},
    "apply": {"to", "equal", "by"},
    "text": set[str](),
}


def _rule(name: str, rule: dict[str, Any], earlier: list[str]) -> Rule:
    kinds = [key for key in _KEYS if key in rule]
    if len(kinds) != 1:
        _refuse(name, "is no rule", f"write one of {', '.join(_KEYS)}")
    for key in rule:
        if key not in {kinds[0], *_KEYS[kinds[0]]}:
            known = ", ".join(sorted(_KEYS[kinds[0]])) or "nothing else"
            _refuse(name, f"unknown key {key!r}", f"beside {kinds[0]}: {known}")
    if kinds[0] == "text":
        return Text(_text(name, rule["text"]))
    if kinds[0] == "apply":
        return _apply(name, rule, earlier)
    if kinds[0] == "range":
        low, high = _pair(name, rule["range"], -_RANGE_MAX, _RANGE_MAX)
        return Span(low, high, *_many(name, rule, high - low + 1))
    items = _list(name, rule["choice"])
    return Choice(items, *_many(name, rule, len(items)))


def _apply(name: str, rule: dict[str, Any], earlier: list[str]) -> Apply:
    function, to, equal = rule["apply"], rule.get("to", []), rule.get("equal")
    if not isinstance(function, str) or function not in _FUNCTIONS:
        _refuse(name, f"no function {function!r}", f"one of {', '.join(_FUNCTIONS)}")
    names = tuple(to) if isinstance(to, list) else (to,)
    if not names or any(n not in earlier for n in names):
        way_out = f"one or more of: {', '.join(earlier) or 'there is none above it'}"
        _refuse(name, "`to` has to name parameters above it", way_out)
    by = rule.get("by", " ")
    if not isinstance(by, str) or (equal is not None and not _atom(equal)):
        _refuse(name, "`by` and `equal` are plain values", "write a text or a whole number")
    return Apply(function, names, equal, by)


def _list(name: str, value: object) -> tuple[Atom, ...]:
    if isinstance(value, str):
        if value not in LISTS:
            _refuse(name, f"no list {value!r}", f"one of {', '.join(LISTS)}, or a list of your own")
        return LISTS[value]
    if not isinstance(value, list) or not value or not all(_atom(item) for item in value):
        _refuse(name, "not a list of texts or whole numbers", 'write ["a", "b"]')
    return tuple(value)


def _many(name: str, rule: dict[str, Any], there: int) -> tuple[tuple[int, int] | None, bool]:
    count, distinct = rule.get("count"), rule.get("distinct", False)
    if not isinstance(distinct, bool):
        _refuse(name, "`distinct` is true or false", "write distinct = true")
    if count is None:
        return None, distinct
    most = min(COUNT_MAX, there) if distinct else COUNT_MAX
    both = count if isinstance(count, list) else [count, count]
    return _pair(name, both, 0, most), distinct


def _pair(name: str, value: object, low: int, high: int) -> tuple[int, int]:
    whole = isinstance(value, list) and all(type(item) is int for item in value)
    if not isinstance(value, list) or not whole or len(value) != 2:
        _refuse(name, f"{value!r} is not two whole numbers", "write [3, 9]")
    if not low <= value[0] <= value[1] <= high:
        _refuse(name, f"{value} is not within {low} to {high}, rising", "write [3, 9]")
    return value[0], value[1]


def _atom(value: object) -> bool:
    if isinstance(value, str):
        return "{{" not in value and value.isprintable() and len(value) <= 256
    return type(value) is int


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        _refuse(name, "not a text of at most 4096 characters", 'write "…{{other}}…"')
    return value


def _refuse(name: str, problem: str, way_out: str) -> NoReturn:
    field = f"metadata.muster_parameters{name and '.'}{name}"
    raise InvalidInput(problem, field=field, value=name, way_out=way_out)
