"""How far a replica is, by the calls that ask for its credit, and what that decides."""

from __future__ import annotations

from services.router import events as e
from services.router.fleet import Fleet
from services.router.loads import Load
from services.router.placements import PredictedFinish, ReplicaView, TurnRequest
from services.router.rules import RouterRules
from tests.unit.router.granted import told

RULES = RouterRules(
    "r", 1, placement="predicted_finish", probes=True, prefix_block_tokens=16, turn_tokens_max=64
)


def fleet(**trips: float) -> Fleet:
    """Proven replicas whose calls take so long; no seats, so each turn is placed."""
    made = Fleet(RULES)
    made.replicas_are(tuple(e.Replica(name, name) for name in trips), 0.0)
    for name, trip_s in trips.items():
        hear(made, name, trip_s)
        made.health.due(0.0)
        made.heard(e.ReplicaProbed(name, "first", True), 0, 0.0)
    return made


def hear(made: Fleet, name: str, trip_s: float, life: str = "first") -> None:
    made.heard(told(name, trip_s=trip_s, life=life), 0, 0.0)


def turn(home: str = "", context: int = 500) -> TurnRequest:
    return TurnRequest("e", "g", home, context, marks=((11, 128), (12, 496)))


def test_the_nearer_of_two_equal_replicas_is_chosen() -> None:
    assert fleet(a=0.080, b=0.004).place(turn(), 0.0).replica == "b"


def test_parts_of_a_millisecond_decide_nothing() -> None:
    assert fleet(a=0.0009, b=0.0002).place(turn(), 0.0).replica == "a"


def test_replicas_whose_distance_is_unknown_are_equal() -> None:
    assert fleet(a=0.0, b=0.0).place(turn(), 0.0).replica == "a"


def test_calls_that_waited_do_not_make_a_replica_far() -> None:
    load = Load()
    for trip_s in (0.5, 0.021, 1.9, 0.4):
        load.trip(trip_s)
    assert load.distance_s == 0.021


def test_a_way_that_became_longer_is_believed_after_a_while() -> None:
    load = Load()
    for trip_s in (0.002, *[0.150] * 16):
        load.trip(trip_s)
    assert load.distance_s == 0.150


def test_noise_of_the_line_moves_no_conversation() -> None:
    made = fleet(a=0.002, b=0.002)
    assert made.place(turn(), 0.0).replica == "a"
    made.request_over("e")
    for trip_s in [0.4] * 16:
        hear(made, "a", trip_s)
    assert made.place(turn("a"), 0.0).replica == "a"


def test_another_process_of_that_name_may_be_elsewhere() -> None:
    made = fleet(a=0.080, b=0.040)
    hear(made, "a", 0.004, life="second")
    assert made.loads.loads["a"].distance_s == 0.004


def test_a_far_replica_is_predicted_to_end_that_much_later() -> None:
    policy = PredictedFinish.of(RULES)
    near, far = ReplicaView("a", 0, 0), ReplicaView("b", 0, 0, distance_s=0.2)
    terms = policy.choose(turn(), (near, far)).terms
    assert round(terms["b"] - terms["a"], 9) == 0.2
