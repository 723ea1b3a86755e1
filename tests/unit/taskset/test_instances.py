"""Parameters of a task: what they are worth under a seed, and which are refused."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from muster import instances
from muster.errors import InvalidInput
from muster.instances import EVAL_SEEDS, Drawn

RULES = """
file = { choice = "words" }
size = { range = [3, 900] }
names = { choice = "words", count = [2, 5], distinct = true }
rolls = { range = [1, 6], count = 4 }
total = { apply = "sum", to = "rolls" }
"""

NUMBERS = {"a": 10, "b": 4, "c": 16}


def drawn(rules: str, seed: int = 0, task: str = "team/task") -> dict[str, Drawn]:
    return instances.draw(task, instances.parse(tomllib.loads(rules)), seed)


def test_a_seed_gives_the_same_on_every_machine_and_python() -> None:
    # Written down once. A change here makes every recorded seed mean something else.
    assert drawn(RULES, 7) == {
        "file": "hollow",
        "size": 611,
        "names": ("temple", "needle", "crystal", "zephyr"),
        "rolls": (3, 2, 6, 5),
        "total": 16,
    }


def test_seeds_and_tasks_draw_apart() -> None:
    assert len({str(drawn(RULES, seed)) for seed in range(50)}) == 50
    assert drawn(RULES, 7, "team/other") != drawn(RULES, 7)


def test_a_further_parameter_leaves_the_others_as_they_were() -> None:
    # Of a seed whose first draw is on the right side of the split either way.
    one = [drawn('a = { choice = "words" }', seed)["a"] for seed in range(40)]
    two = [drawn('z = { range = [0, 9] }\na = { choice = "words" }', s)["a"] for s in range(40)]
    assert sum(a == b for a, b in zip(one, two, strict=True)) > 20


def test_what_training_can_draw_is_never_held_out() -> None:
    rules = "a = { range = [0, 9] }\nb = { range = [0, 9] }"
    trained = {str(drawn(rules, seed)) for seed in range(600)}
    held_out = {str(drawn(rules, EVAL_SEEDS + seed)) for seed in range(200)}
    assert trained & held_out == set()
    assert len(held_out) > 5


def test_parameters_with_too_few_combinations_have_nothing_to_hold_out() -> None:
    """The one combination lies on one side of the split; the other side has none."""
    one = 'a = { choice = ["one"] }'
    held_out = instances.held_out({"a": "one"})
    with pytest.raises(InvalidInput, match=r"too few different instances .* more values"):
        drawn(one, 0 if held_out else EVAL_SEEDS)
    assert drawn(one, EVAL_SEEDS if held_out else 0) == {"a": "one"}


@pytest.mark.parametrize(
    ("function", "worth"),
    [
        ("count", 3),
        ("sum", 30),
        ("product", 640),
        ("min", 4),
        ("max", 16),
        ("first", 10),
        ("last", 16),
    ],
)
def test_functions_of_numbers(function: str, worth: Drawn) -> None:
    # `n` is there for the split: it needs something that can differ.
    fixed = "".join(f"{name} = {{ range = [{n}, {n}] }}\n" for name, n in NUMBERS.items())
    rule = f'x = {{ apply = "{function}", to = ["a", "b", "c"] }}'
    assert drawn(f"n = {{ range = [0, 999] }}\n{fixed}{rule}")["x"] == worth


@pytest.mark.parametrize(
    ("rule", "worth"),
    [
        ('{ apply = "sorted", to = ["b", "a", "c"] }', ("ape", "bee", "cat")),
        ('{ apply = "reversed", to = ["a", "b"] }', ("bee", "ape")),
        ('{ apply = "unique", to = ["a", "b", "a"] }', ("ape", "bee")),
        ('{ apply = "upper", to = "a" }', ("APE",)),
        ('{ apply = "backwards", to = ["a"] }', ("epa",)),
        ('{ apply = "length", to = ["a", "d"] }', (3, 5)),
        ('{ apply = "join", to = ["a", "b"], by = ", " }', "ape, bee"),
        ('{ apply = "count", to = ["a", "b", "a"], equal = "ape" }', 2),
        ('{ text = "{{a}}-{{b}}.txt" }', "ape-bee.txt"),
    ],
)
def test_functions_of_texts(rule: str, worth: Drawn) -> None:
    words = {"a": "ape", "b": "bee", "c": "cat", "d": "hippo"}
    fixed = "".join(f'{name} = {{ choice = ["{word}"] }}\n' for name, word in words.items())
    assert drawn(f"n = {{ range = [0, 999] }}\n{fixed}x = {rule}")["x"] == worth


def test_numbers_sort_by_size_and_texts_by_letter() -> None:
    numbers = 'n = { range = [1, 200], count = 30 }\ns = { apply = "sorted", to = "n" }'
    found = drawn(numbers)["s"]
    assert isinstance(found, tuple)
    assert list(found) == sorted(found, key=int)


def test_distinct_draws_are_distinct_and_reach_everything() -> None:
    seen: set[object] = set()
    for seed in range(40):
        found = drawn("n = { range = [0, 9], count = 6, distinct = true }", seed)["n"]
        assert isinstance(found, tuple)
        assert len(set(found)) == 6
        seen |= set(found)
    assert seen == set(range(10))


def test_values_take_the_place_of_their_names() -> None:
    values: dict[str, Drawn] = {"a": "x", "n": (3, 4)}
    text = "{{a}}: {{n.1}}, all:\n{{n}}\nnot {{ a }}, not {a}, not {{A}}"
    filled = instances.render(text, values, "instruction.md")
    assert filled == "x: 4, all:\n3\n4\nnot {{ a }}, not {a}, not {{A}}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{{fil}}", r"no such parameter, used in instruction.md → did you mean 'file'"),
        ("{{file.3}}", r"has 1 values, instruction.md asks for number 3"),
    ],
)
def test_a_name_that_is_not_there_is_told(text: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        instances.render(text, {"file": "x"}, "instruction.md")


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ("a = 3", r"muster_parameters.a = 'a': 3 is not a rule → write \{ choice"),
        ("a = {}", "is no rule → write one of choice, range, apply, text"),
        ("A = { range = [1, 2] }", "not a parameter's name"),
        ("a = { range = [2, 1] }", "rising"),
        ("a = { range = [1, 2, 3] }", "two whole numbers"),
        ("a = { range = [1, 2], step = 3 }", "unknown key 'step' → beside range: count, distinct"),
        ("a = { choice = [] }", "not a list"),
        ("a = { choice = [1.5] }", "not a list of texts or whole numbers"),
        ('a = { choice = ["{{b}}"] }', "not a list"),
        ('a = { choice = ["x\\u001b[2J"] }', "not a list"),
        ('a = { choice = "wrods" }', "no list 'wrods' → one of words"),
        ("a = { range = [1, 2], count = 3, distinct = true }", "within 0 to 2"),
        ("a = { range = [1, 2], count = 9999 }", "within 0 to 256"),
        ("a = { range = [1, 2], count = 2, distinct = 1 }", "true or false"),
        ('a = { apply = "eval", to = [] }', "no function 'eval' → one of count, sum"),
        ('a = { apply = ["sum"], to = [] }', "no function"),
        ('a = { apply = "sum", to = [["a"]] }', "parameters above it"),
        ('a = { apply = "sum", to = "b" }', "parameters above it"),
        ('a = { text = "{{b}}" }', "no such parameter"),
        ('a = { choice = ["x"] }\nb = { apply = "sum", to = "a" }', "sum: needs whole numbers"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(rules: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        drawn(rules)


def test_texts_within_texts_stay_bounded() -> None:
    """Ten doublings of a text are a thousand of it, fifty would be more than any memory."""
    rules = 'a0 = { text = "0123456789abcdef" }\n'
    rules += "".join(f'a{n + 1} = {{ text = "{{{{a{n}}}}}{{{{a{n}}}}}" }}\n' for n in range(25))
    with pytest.raises(InvalidInput, match="over 65536 bytes"):
        drawn(rules)


@pytest.mark.parametrize("seed", [-1, 1 << 31])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(InvalidInput, match=r"not a seed → 0 to 2147483647"):
        drawn(RULES, seed)


def test_a_table_that_is_none_is_refused() -> None:
    wrong: Any = ["a"]
    with pytest.raises(InvalidInput, match="has to be a table"):
        instances.parse(wrong)
