"""The replica's state: who may do what, and when it must not serve."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muster.errors import Exhausted, Fenced, InvalidInput, Refused, Unavailable
from muster.types import EpisodeKey, SamplingParams
from services.inference.engine import Load
from services.inference.replica import Bounds, Replica, State, engine_name
from services.inference.sampling import check_sampling


def key(epoch: int = 1, run: str = "main") -> EpisodeKey:
    return EpisodeKey(run, "g", 0, 0, epoch)


def serving() -> Replica:
    replica = Replica("main", Bounds(requests_max=2, scores_max=1, tokens_max=100))
    replica.started(4)
    return replica


def admit(replica: Replica, name: str = "a", **change: object) -> None:
    values = {"prompt": 10, "max_tokens": 10} | change
    replica.admit_request(key(), name, **values)  # type: ignore[arg-type]


def test_nothing_is_served_before_the_start_is_over() -> None:
    replica = Replica("main", Bounds(requests_max=2, scores_max=1, tokens_max=100))

    with pytest.raises(Unavailable, match="starting"):
        admit(replica)
    with pytest.raises(Unavailable, match="starting"):
        replica.check_prepare(5, 4)


@pytest.mark.parametrize(("published", "serves"), [(None, True), (4, True), (5, False), (3, False)])
def test_a_start_with_weights_that_nobody_else_serves_is_fenced(
    published: int | None, serves: bool
) -> None:
    replica = Replica("main", Bounds(requests_max=2, scores_max=1, tokens_max=100))
    replica.started(4, published)

    assert replica.state is (State.SERVING if serves else State.FENCED)
    replica.check_prepare(4, 3) if not serves else admit(replica)


def test_a_refusal_because_of_the_state_says_so_in_its_field() -> None:
    """The router holds the episode then, and does not think ill of the replica."""
    replica = serving()
    replica.fence("it missed a version")

    with pytest.raises(Unavailable) as refused:
        admit(replica)
    assert (refused.value.field, refused.value.value) == ("replica.state", "fenced")


def test_a_replaced_router_is_fenced() -> None:
    replica = serving()
    replica.check_owner(key(epoch=3))

    with pytest.raises(Fenced, match="owner epoch 3"):
        replica.admit_request(key(epoch=2), "a", prompt=1, max_tokens=1)
    replica.admit_request(key(epoch=3), "a", prompt=1, max_tokens=1)


def test_a_claim_fences_older_routers_and_makes_their_requests_orphans() -> None:
    replica = serving()
    name = replica.admit_request(key(epoch=2), "a", prompt=1, max_tokens=1)
    replica.claim("main", 3)

    assert replica.orphans == (name,)
    for call in (lambda: replica.check_still_owner(name), lambda: replica.claim("main", 2)):
        with pytest.raises(Fenced, match="owner epoch 3"):
            call()
    assert replica.fenced_calls == 2


def test_a_new_owner_may_ask_again_for_what_its_predecessor_left_running() -> None:
    replica = serving()
    left = replica.admit_request(key(epoch=2), "a", prompt=1, max_tokens=1)
    again = replica.admit_request(key(epoch=3), "a", prompt=1, max_tokens=1)

    assert replica.orphans == (left,)
    replica.check_still_owner(again)


def test_a_replaced_trainer_is_fenced() -> None:
    replica = serving()
    replica.check_trainer("main", 2)

    with pytest.raises(Fenced, match="trainer epoch 2"):
        replica.check_trainer("main", 1)
    assert replica.fenced_calls == 1


def test_another_run_is_refused() -> None:
    with pytest.raises(InvalidInput, match="another run"):
        serving().check_owner(key(run="other"))
    with pytest.raises(InvalidInput, match="another run"):
        serving().claim("other", 1)
    with pytest.raises(InvalidInput, match="another run"):
        serving().check_trainer("other", 1)


def test_requests_are_bounded_and_places_come_back() -> None:
    replica = serving()
    admit(replica, "a")
    admit(replica, "b")

    with pytest.raises(Exhausted, match="2 requests"):
        admit(replica, "c")
    replica.release_request(engine_name(key(), "a"))
    admit(replica, "c")


def test_scores_are_bounded_and_places_come_back() -> None:
    replica = serving()
    replica.admit_score(10)

    with pytest.raises(Exhausted):
        replica.admit_score(10)
    replica.release_score()
    replica.admit_score(10)


def test_a_running_request_cannot_be_doubled() -> None:
    replica = serving()
    admit(replica, "a")

    with pytest.raises(Refused, match="running"):
        admit(replica, "a")


@pytest.mark.parametrize(
    "change",
    [{"prompt": 0}, {"max_tokens": 0}, {"prompt": 91}, {"name": ""}, {"name": "x" * 257}],
)
def test_what_cannot_be_sampled_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        admit(serving(), **change)  # type: ignore[arg-type]


def test_a_context_that_just_fits_is_admitted() -> None:
    admit(serving(), prompt=90, max_tokens=10)


def test_half_an_apply_serves_nothing_until_a_whole_one() -> None:
    replica = serving()
    replica.begin_commit()
    replica.apply_failed("the disk burned")

    with pytest.raises(Unavailable, match="the disk burned"):
        admit(replica)
    with pytest.raises(Unavailable):
        replica.admit_score(10)

    replica.check_prepare(4, 3)  # even the version it last served
    replica.begin_commit()
    replica.committed(5)
    admit(replica)
    assert (replica.state, replica.version, replica.why_fenced) == (State.SERVING, 5, "")


def test_a_refused_commit_changes_nothing() -> None:
    replica = serving()
    replica.begin_commit()
    replica.commit_refused()

    assert (replica.state, replica.version) == (State.SERVING, 4)
    replica.begin_commit()


def test_one_apply_at_a_time() -> None:
    replica = serving()
    replica.begin_commit()

    for verb in (replica.begin_commit, lambda: replica.check_prepare(6, 5)):
        with pytest.raises(Refused, match="being applied"):
            verb()


def test_a_version_taken_elsewhere_and_not_here_fences_until_it_comes() -> None:
    replica = serving()
    replica.missed(5)

    with pytest.raises(Unavailable, match="version 5 is served elsewhere"):
        admit(replica)

    replica.check_prepare(7, 6)  # a later one is as good: it carries every tensor
    replica.begin_commit()
    replica.committed(7)
    admit(replica)


def test_a_replica_that_serves_the_version_after_all_goes_on() -> None:
    replica = serving()
    replica.missed(4)

    admit(replica)


def test_what_went_wrong_first_is_what_is_said() -> None:
    replica = serving()
    replica.begin_commit()
    replica.apply_failed("the disk burned")
    replica.missed(5)

    assert replica.why_fenced == "the disk burned"


def test_a_version_missed_while_starting_is_remembered() -> None:
    replica = Replica("main", Bounds(requests_max=2, scores_max=1, tokens_max=100))
    replica.missed(5)
    replica.started(4)

    assert (replica.state, replica.version) == (State.FENCED, 4)


@pytest.mark.parametrize(("version", "parent"), [(0, -1), (2, 1)])
def test_the_newest_trainer_may_go_back(version: int, parent: int) -> None:
    replica = serving()
    replica.check_trainer("main", 2)
    replica.check_prepare(version, parent)
    replica.begin_commit()
    replica.committed(version)

    assert (replica.state, replica.version) == (State.SERVING, version)


@pytest.mark.parametrize(("version", "parent"), [(-1, -2), (5, 5), (4, 3), (1, -2)])
def test_versions_that_make_no_sense_are_refused(version: int, parent: int) -> None:
    with pytest.raises((InvalidInput, Refused)):
        serving().check_prepare(version, parent)


def test_a_draining_replica_stays_draining() -> None:
    replica = serving()
    replica.begin_commit()
    replica.drain()
    replica.apply_failed("killed")

    assert replica.state is State.DRAINING
    verbs: list[Callable[[], None]] = [lambda: admit(replica), replica.begin_commit]
    for verb in verbs:
        with pytest.raises(Unavailable):
            verb()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", 1 << 64),
    ],
)
def test_sampling_out_of_range_names_its_field(field: str, value: float) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_sampling(SamplingParams(**{field: value}))

    assert refused.value.field == f"sampling.{field}"


def granting(share: float = 0.5) -> Replica:
    bounds = Bounds(
        requests_max=2, scores_max=1, tokens_max=100, credit_share=share, credit_ttl_s=7.0
    )
    replica = Replica("main", bounds, life="one")
    replica.started(4)
    return replica


def test_a_credit_is_a_share_of_the_cache_for_a_while() -> None:
    grant = granting().grant("main", 1, Load(kv_tokens_total=1001))
    assert (grant.credit_tokens, grant.ttl_s) == (500, 7.0)
    assert (grant.life, grant.version, grant.state) == ("one", 4, State.SERVING)
    assert grant.detail == ""


def test_who_serves_nothing_grants_nothing_and_says_why() -> None:
    fenced, draining = granting(), granting()
    fenced.fence("it missed version 5")
    draining.drain()
    starting = Replica("main", Bounds(requests_max=2, scores_max=1, tokens_max=100))
    grants = [r.grant("main", 1, Load(kv_tokens_total=1000)) for r in (fenced, draining, starting)]
    assert [grant.credit_tokens for grant in grants] == [0, 0, 0]
    assert grants[0].detail == "it missed version 5"
    assert "draining" in grants[1].detail
    assert "starting" in grants[2].detail


def test_whoever_asks_for_a_credit_hears_that_weights_are_being_applied() -> None:
    replica = granting()
    assert not replica.grant("main", 1, Load()).updating
    replica.begin_commit()
    assert replica.grant("main", 1, Load(kv_tokens_total=1000)).updating
    replica.committed(5)
    assert not replica.grant("main", 1, Load()).updating


def test_asking_for_a_credit_is_a_claim() -> None:
    replica = granting()
    name = replica.admit_request(key(epoch=2), "a", prompt=1, max_tokens=1)
    replica.grant("main", 3, Load())
    assert replica.orphans == (name,)
    with pytest.raises(Fenced, match="owner epoch 3"):
        replica.grant("main", 2, Load())


def test_another_run_gets_no_credit() -> None:
    with pytest.raises(InvalidInput, match="another run"):
        granting().grant("other", 1, Load())
