"""KV-Fit by hand: each rule of the state machine on contexts small enough to add up."""

from __future__ import annotations

import pytest

from tests.unit.router.hall import Hall

# -- fits ----------------------------------------------------------------------------------


def test_what_fits_beside_all_that_outranks_it_goes_on() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=300)
    assert hall.turn("b", 370) == "r"


def test_what_does_not_fit_beside_them_is_held() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=300)
    assert hall.turn("b", 371) == ""
    assert hall.seats.holds("b")


def test_smaller_ones_do_not_count_against_a_larger_one() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=300)
    assert hall.turn("a", 700) == "r"  # 1,000 in all, and nobody outranks it


def test_held_ones_and_those_at_their_tools_count() -> None:
    hall = Hall("r")
    hall.fill(a=500, b=400, c=50)
    hall.reply("a", 580)  # at its tool
    assert hall.turn("b", 400) == ""
    assert hall.turn("c", 60) == ""


def test_among_equals_the_one_launched_first_outranks_the_other() -> None:
    hall = Hall("r")
    hall.fill(a=400, b=400)
    hall.reply("b", 600)
    hall.reply("a", 600)
    assert hall.seats.ready("b", 600, 0.0) == ""
    assert hall.seats.ready("a", 600, 0.0) == "r"


def test_the_first_in_rank_always_fits_however_large() -> None:
    hall = Hall("r")
    hall.fill(a=400, b=400)
    assert hall.turn("a", 5000) == "r"


@pytest.mark.parametrize(("trust_lost", "want"), [(0, "r"), (1, "")])
def test_a_credit_that_is_trusted_less_admits_less(trust_lost: int, want: str) -> None:
    hall = Hall()
    hall.grant("r", 100_000)
    hall.fill(a=60_000, b=30_000)
    hall.reply("a", 60_000, cached=60_000 - 8_000 * trust_lost)  # 8,000 of 100,000: 2 % of trust
    assert hall.turn("b", 36_000) == want  # 96,000 of 97,000, or of 95,060


# -- launch --------------------------------------------------------------------------------


def test_a_young_one_counts_with_the_room_it_will_need() -> None:
    hall = Hall("r", reserve=300)
    assert [hall.begin(id_) for id_ in "abc"] == ["r"] * 3
    assert not hall.seats.launch("d", "d", 10, 0.0)  # 3 x 300, and 300 more, is above 1,000


def test_a_grown_one_counts_with_what_it_has() -> None:
    hall = Hall("r", reserve=300)
    hall.fill(a=650)
    assert hall.seats.launch("b", "b", 10, 0.0)
    hall = Hall("r", reserve=300)
    hall.fill(a=701)
    assert not hall.seats.launch("b", "b", 10, 0.0)


def test_a_launch_goes_where_least_is_taken() -> None:
    hall = Hall("r", "s")
    hall.fill(a=500)
    assert hall.begin("b") == "s"
    assert hall.begin("c") == "s"  # 200 with the room they will need, against 500


def test_nothing_is_launched_where_one_is_held() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=100)
    assert hall.turn("b", 400) == ""
    assert hall.settled() == []
    hall.reply("a", 600)
    assert not hall.seats.launch("c", "c", 1, 0.0)


def test_an_empty_replica_takes_one_however_small_its_credit() -> None:
    hall = Hall(reserve=300)
    hall.grant("r", 200)
    assert hall.begin("a", 150) == "r"
    assert not hall.seats.launch("b", "b", 1, 0.0)


@pytest.mark.parametrize("how", ["closed", "strange"])
def test_a_replica_that_is_not_well_takes_no_new_one(how: str) -> None:
    hall = Hall("r", "s")
    getattr(hall, how).add("r")
    assert [hall.begin("a"), hall.begin("b")] == ["s", "s"]


# -- settle --------------------------------------------------------------------------------


def test_the_end_of_a_larger_one_lets_the_held_one_on() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=300)
    hall.turn("b", 400)
    assert hall.settled() == []
    hall.seats.over("a")
    assert hall.settled() == ["b"]
    assert hall.seats.ready("b", 400, 0.0) == "r"


def test_the_best_ranked_one_goes_first_and_whoever_fits_beside_it_follows() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=100, c=100, d=100)
    for id_, context in (("d", 380), ("c", 500), ("b", 450)):
        assert hall.turn(id_, context) == ""
    hall.seats.over("a")
    assert hall.settled() == ["c", "b"]  # 950; 380 more do not fit


def test_a_held_one_moves_where_it_fits_and_costs_little() -> None:
    hall = Hall("r", "s")
    hall.fill(a=600, z=400, b=100)  # b is at home on s, beside z
    hall.seats.at("b", "r")
    assert hall.seats.ready("b", 380, 0.0) == ""
    assert hall.settled() == ["b"]  # 400 and 380 fit on s
    assert hall.seats.ready("b", 380, 0.0) == "s"


def test_it_moves_nowhere_where_it_does_not_fit_beside_everybody_who_goes_on() -> None:
    hall = Hall("r", "s")
    hall.fill(a=600, z=600, b=100)
    home = hall.seats.home("b")
    assert hall.turn("b", 380) == ""
    assert hall.settled() == []
    assert hall.seats.home("b") == home


def test_it_moves_nowhere_where_another_one_is_held() -> None:
    hall = Hall("r", "s")
    hall.fill(a=600, z=600, b=10, y=10)
    hall.seats.at("b", "r")
    hall.seats.at("y", "s")
    assert hall.seats.ready("y", 390, 0.0) == ""
    assert hall.settled() == []
    hall.turn("a", 700)
    assert hall.seats.ready("b", 300, 0.0) == ""  # would fit beside the 600 of s
    assert hall.settled() == []
    hall.seats.over("y")
    hall.seats.every(0.0)
    assert hall.settled() == ["b"]


@pytest.mark.parametrize(("most_s", "moved"), [(0.01, []), (6.0, ["b"])])
def test_a_move_that_costs_too_much_prefill_is_not_made(most_s: float, moved: list[str]) -> None:
    hall = Hall("r", "s", migrate_prefill_s=most_s)
    hall.fill(a=600, z=500)
    hall.begin("b")
    home = hall.seats.home("b")
    hall.seats.at("b", "r" if home == "s" else home)
    hall.reply("b", 390)
    assert hall.seats.ready("b", 390, 0.0) == ""
    assert hall.settled() == moved


def test_a_cold_cache_may_be_left_at_any_price() -> None:
    hall = Hall("r", "s", migrate_prefill_s=0.0)
    hall.fill(a=600, z=500)
    hall.begin("b")
    hall.seats.at("b", "r")
    hall.reply("b", 390)
    hall.seats.cleared("r")
    assert hall.seats.ready("b", 390, 0.0) == "s"


# -- the guard of the credit -----------------------------------------------------------------


def trust(hall: Hall) -> float:
    return hall.seats._credits["r"].trust


@pytest.mark.parametrize(
    ("cached", "want"), [(50_000, 1.0), (49_000, 1.0), (40_000, 1 - 0.25 * 10_000 / 100_000)]
)
def test_what_is_not_found_of_the_last_turn_lowers_the_trust(cached: int, want: float) -> None:
    hall = Hall()
    hall.grant("r", 100_000)
    hall.fill(a=50_000)
    hall.reply("a", 50_000, cached=cached)
    assert trust(hall) == pytest.approx(want)


def test_trust_has_a_floor_and_comes_back_slowly() -> None:
    hall = Hall()
    hall.grant("r", 1000)
    hall.fill(a=90_000)
    for _ in range(9):
        hall.reply("a", 90_000, cached=0)
    assert trust(hall) == 0.4
    hall.grant("r", 10_000)
    hall.reply("a", 90_000)
    assert trust(hall) == pytest.approx(0.4 + 75 / 10_000)


@pytest.mark.parametrize("excuse", ["held", "moved", "cleared"])
def test_after_a_hold_a_move_or_a_cleared_cache_nothing_is_held_against_the_credit(
    excuse: str,
) -> None:
    hall = Hall("r")
    hall.grant("r", 100_000)
    hall.fill(a=60_000, b=30_000)
    hall.reply("b", 50_000)
    match excuse:
        case "held":
            assert hall.seats.ready("b", 50_000, 0.0) == ""
            hall.seats.over("a")
            assert hall.settled() == ["b"]
        case "moved":
            hall.grant("s", 100_000)
            hall.seats.at("b", "s")
            hall.seats.at("b", "r")
        case "cleared":
            hall.seats.cleared("r")
    hall.reply("b", 50_000, cached=0)
    assert trust(hall) == 1.0


def test_another_life_has_a_credit_and_a_trust_of_its_own() -> None:
    hall = Hall()
    hall.grant("r", 100_000)
    hall.fill(a=50_000)
    hall.reply("a", 50_000, cached=0)
    assert trust(hall) < 1.0
    hall.grant("r", 100_000, anew=True)
    assert (trust(hall), hall.seats.kept("a")) == (1.0, 0)


# -- the end of a conversation -----------------------------------------------------------------


def test_a_large_dead_cache_is_stepped_behind_those_that_wait_for_tools_in_their_order() -> None:
    hall = Hall("r")
    hall.fill(a=300, b=100, c=110, d=120, e=130)
    for id_ in ("c", "b", "d"):
        hall.reply(id_, 120)
    hall.seats.ready("d", 120, 0.0)  # generates: it is used right now
    assert hall.seats.over("a") == ("c", "b")


def test_a_small_dead_cache_is_let_be() -> None:
    hall = Hall("r")
    hall.fill(a=199, b=100)
    hall.reply("b", 100)
    assert hall.seats.over("a") == ()


def test_caches_that_are_gone_are_not_touched() -> None:
    hall = Hall("r")
    hall.fill(a=300, b=100, c=50)
    hall.reply("b", 100)
    hall.seats.cleared("r")
    hall.reply("a", 300)
    assert hall.seats.over("a") == ()


def test_what_is_over_leaves_nothing() -> None:
    hall = Hall("r")
    hall.fill(a=600, b=300)
    hall.turn("b", 400)
    hall.seats.over("b")
    hall.seats.over("a")
    row = hall.seats._rows["r"]
    assert (row.load, row.live, row.reserved, row.ranked, row.held, row.tools) == (
        0,
        0,
        0,
        [],
        [],
        {},
    )
    assert not hall.seats._aging
    assert not hall.seats._groups
    assert not list(hall.seats.programs())
