"""Which groups are too far off: the parts of the rule that stories do not tell."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from muster.errors import ConfigError
from muster.types import EpisodeKey, SamplingParams
from services.readybank import events as e
from services.readybank.assembly import GroupAssembly
from services.readybank.config import ReadyBankConfig, check
from services.readybank.drift import FINE, Decision, Drifts, calibrates, scorable
from services.readybank.ledger import Ledger
from services.readybank.lineage import Lineage
from sim.builders import INFRA, RUN, attempt, opened, scored

RULES = e.BankRules(kl_sure=0.02, kl_refuse=0.1, calibrate_share=0.0, score_wait_s=10.0)


class Here:
    def __init__(self, rules: e.BankRules = RULES, moved: float | None = 0.05):
        self.lineage = Lineage()
        self.ledger = Ledger(self.lineage)
        self.drifts = Drifts(rules, self.lineage, self.ledger)
        self.version(1, moved)

    def version(self, number: int, moved: float | None) -> None:
        self.lineage.see(number, number - 1, published=True)
        self.ledger.see(number, moved)


def group(name: str, *versions: int, sampling: SamplingParams | None = None) -> GroupAssembly:
    """A sibling of each version."""
    found = GroupAssembly(name)
    event = opened(name, len(versions))
    found.open(event if sampling is None else replace(event, sampling=sampling))
    for sibling, version in enumerate(versions):
        key = EpisodeKey(RUN, name, sibling, 0, 1)
        events, label = attempt(key, scored(1.0), version=version)
        for one in (*events, label):
            found.take(one)  # type: ignore[arg-type]
    return found


def test_by_default_nothing_is_refused_or_scored() -> None:
    here = Here(e.BankRules(), moved=9.0)
    assert here.drifts.judge(group("a-0", 0), 0.0) == FINE
    assert here.drifts.next() is None


def test_an_invalid_sibling_is_not_asked_how_far_it_is() -> None:
    here, found = Here(moved=9.0), group("a-0", 1)
    found.siblings[0].label = INFRA
    assert here.drifts.judge(found, 0.0) == FINE


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.7), SamplingParams(top_p=0.9), SamplingParams(top_k=5)],
)
def test_what_no_engine_scores_is_admitted_at_once(sampling: SamplingParams) -> None:
    here = Here()
    assert not scorable(sampling)
    assert here.drifts.judge(group("a-0", 0, sampling=sampling), 0.0) == FINE
    assert here.drifts.next() is None


def test_the_worst_are_scored_and_one_group_at_a_time_the_first_first() -> None:
    here = Here()
    here.version(2, 0.001)
    for name in ("b-0", "a-0"):
        here.drifts.judge(group(name, 1, 0, 2, 0), 0.0)
        here.drifts.judge(group(name, 1, 0, 2, 0), 1.0)  # judged again, its turn is the same
    first = here.drifts.next()
    assert first is not None
    assert (first.group, first.version) == ("b-0", 2)
    assert [s.sibling for s in first.siblings] == [1, 3]
    assert here.drifts.next() is None
    here.drifts.missed("b-0")
    here.drifts.judge(group("b-0", 1, 0, 2, 0), 2.0)
    second = here.drifts.next()
    assert second is not None
    assert second.group == "a-0"


def test_a_group_is_not_scored_for_ever_as_versions_go_on() -> None:
    here, found = Here(e.BankRules(kl_sure=0.02, kl_refuse=9.0, scores_max=2)), group("a-0", 0)
    asked = 0
    for version in range(2, 9):
        here.drifts.judge(found, 0.0)
        wanted = here.drifts.next()
        if wanted:
            asked += 1
            score = e.Score(0, 0, wanted.version, 4, 0.01)
            here.drifts.scored(e.GroupScored("a-0", (score,)))
            assert here.drifts.judge(found, 0.0).decision is Decision.FINE
        here.version(version, 0.05)
    assert asked == 2


def test_a_score_of_an_older_version_does_not_decide() -> None:
    here, found = Here(), group("a-0", 0)
    here.drifts.judge(found, 0.0)
    here.drifts.next()
    here.version(2, 0.0001)
    here.drifts.scored(e.GroupScored("a-0", (e.Score(0, 0, 1, 4, 0.09),)))
    assert here.drifts.judge(found, 0.0).decision is Decision.WAIT  # asked for again


def test_what_is_over_takes_no_memory() -> None:
    here = Here()
    here.drifts.judge(group("a-0", 0), 0.0)
    here.drifts.forget("a-0")
    assert not here.drifts._doubts
    assert not here.drifts._waiting
    assert here.drifts.next() is None


def test_about_the_share_of_all_names_is_chosen_and_always_the_same() -> None:
    names = [f"job-{number:05d}" for number in range(20_000)]
    chosen = [name for name in names if calibrates(name, 0.02)]
    assert 300 < len(chosen) < 500
    assert chosen == [name for name in names if calibrates(name, 0.02)]
    assert not any(calibrates(name, 0.0) for name in names)
    assert all(calibrates(name, 1.0) for name in names)


def test_what_is_sure_lies_below_what_is_refused() -> None:
    check(ReadyBankConfig())
    check(ReadyBankConfig(kl_refuse=0.02))
    with pytest.raises(ConfigError) as caught:
        check(ReadyBankConfig(kl_refuse=0.01))
    assert caught.value.field == "readybank.kl_refuse"
