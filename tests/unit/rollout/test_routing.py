"""The race of placement policies: equal for equal seeds, and every group ends in every case."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from bench._routing_page import written
from bench.routing import interval, ratios
from muster.types import EpisodeKey, Outcome, OutcomeLabel
from services.router import events as e
from sim.rollout.routing import (
    ALONE,
    CASES,
    OTHERS,
    OURS,
    Case,
    Figures,
    Race,
    arm_of,
    pressed,
    size,
)

GROUPS = 2


def ran(name: str, case: Case, seed: int = 1) -> Figures:
    return Race(name, replace(case, context_limit=32_768), seed, GROUPS).run()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_group_ends_in_every_case_and_again_at_the_same_time(case: Case) -> None:
    case = replace(case, killed_at_s=20.0) if case.killed_at_s else case
    first = ran("sticky_least_loaded", case)
    assert first == ran("sticky_least_loaded", case)
    assert 0 < first.group_finish_s <= first.all_finish_s


def test_a_sibling_whose_attempts_are_used_up_is_over() -> None:
    race = Race(OURS, CASES[0], 1, GROUPS)
    size = race._regime.group_size
    lost, good = (
        OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost"),
        OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0),
    )

    def ends(sibling: int, attempt: int, label: OutcomeLabel) -> bool:
        key = EpisodeKey("r", "job-00000", sibling, attempt, 1)
        race._watch(e.Tick(), [e.RecordEpisode(key, label, 1, "h", (), 0.0, 1.0)])
        return bool(race._finished)

    assert not any(ends(sibling, 0, good) for sibling in range(1, size))
    most = race._world.router.machine.rules.repairs_max
    assert [ends(0, attempt, lost) for attempt in range(most + 1)] == [False] * most + [True]


def test_a_killed_replica_makes_its_conversations_move() -> None:
    case = replace(CASES[1], killed_at_s=100.0)
    assert ran(OURS, case, 4).migrations > ran(OURS, CASES[1], 4).migrations == 0


def test_an_update_makes_contexts_be_computed_again() -> None:
    often = replace(CASES[1], update_every_s=30.0)
    assert ran(OURS, often).recomputed_tokens > ran(OURS, CASES[1]).recomputed_tokens


def test_pressure_sets_the_kv_of_a_replica() -> None:
    half, twice = (pressed(size(32), CASES[n], 1, 32).kv_tokens for n in (0, 2))
    assert half == pytest.approx(4 * twice, rel=0.01)


def test_the_others_let_everybody_go_on() -> None:
    assert arm_of("cache_aware").admission == "none"
    assert arm_of(OURS).has("admission")


def figures(seed: int, finish_s: float) -> Figures:
    return Figures("x", "c", seed, finish_s, finish_s, 0, 0, 1.0, 0, 0)


def test_a_constant_ratio_has_no_spread() -> None:
    ours = [figures(n, 100.0 + n) for n in range(5)]
    others = [figures(n, 1.1 * (100.0 + n)) for n in range(5)]
    assert interval(others, ours) == pytest.approx((1.1, 1.1, 1.1))
    others[0] = figures(0, 150.0)
    low, mean, high = interval(others, ours)
    assert low < mean < high


def test_the_page_keeps_its_words_and_gets_the_figures_of_the_run() -> None:
    names = (*OTHERS, OURS, ALONE)
    found = [
        replace(figures(seed, 100.0 + 10 * n), arm=name, case=case.name)
        for case in CASES
        for n, name in enumerate(names)
        for seed in (1, 2)
    ]
    numbers, told = ratios(found)
    settings = {"quick": False, "seeds": "1-2", "groups": 4}
    result = {"figures": numbers, "ratios": told, "settings": settings}
    page = written(written("# Words\n\n## Measured\n\nnone yet\n", result), result)
    assert page.startswith("# Words\n\n## Measured\n\nSeeds 1-2 (judging seeds)")
    assert page.count("## Measured") == 1
    assert "none yet" not in page
    row = (
        f"| killed | {OTHERS[0]} | 100 | 160 | 0.625 [0.625, 0.625] | 170 | 0.588 [0.588, 0.588] |"
    )
    assert row in page


def test_one_seed_has_no_interval() -> None:
    low, mean, high = interval([figures(1, 110.0)], [figures(1, 100.0)])
    assert mean == pytest.approx(1.1)
    assert math.isnan(low)
    assert math.isnan(high)


@pytest.mark.parametrize(("seeds", "t"), [(6, 2.571), (20, 2.093), (41, 2.021), (121, 1.980)])
def test_an_interval_is_as_wide_as_its_number_of_seeds_demands(seeds: int, t: float) -> None:
    """Ours always 100, the others' mean 100 with a known deviation."""
    others = [figures(n, 100.0 + (n % 2 * 2 - 1) * 10) for n in range(seeds - seeds % 2)]
    others += [figures(seeds, 100.0)] * (seeds % 2)
    ours = [figures(n, 100.0) for n in range(seeds)]
    low, mean, high = interval(others, ours)
    deviation = 0.1 * ((seeds - seeds % 2) / (seeds - 1)) ** 0.5
    assert mean == pytest.approx(1.0)
    assert (high - low) / 2 == pytest.approx(t * deviation / seeds**0.5, rel=1e-3)
