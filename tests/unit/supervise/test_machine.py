"""The supervisor's decisions, told as stories of one bank, one router and their server."""

from __future__ import annotations

import pytest

from muster.supervise.machine import (
    AllReady,
    Command,
    Event,
    Exited,
    Finish,
    Healthy,
    Kill,
    NotStarted,
    Report,
    Rules,
    ServiceRule,
    Start,
    StopAsked,
    SupervisorMachine,
    Terminate,
    Tick,
)

RULES = Rules(
    (
        ServiceRule("redis", last=True),
        ServiceRule("bank", after=("redis",), outlives=("router",), ready_s=10.0),
        ServiceRule("router", after=("redis",)),
    ),
    restarts_max=2,
    window_s=100.0,
    backoff_s=1.0,
    drain_s=1.5,
    grace_s=5.0,
    unready_grace_s=3.0,
    last_s=2.0,
    hard_s=9.0,
)


class Story:
    """Feeds a machine; what it answers but for reports."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.machine = SupervisorMachine(rules)
        self.told: list[Report] = []

    def at(self, now: float, event: Event) -> list[Command]:
        commands = self.machine.handle(event, now)
        self.told += [c for c in commands if isinstance(c, Report)]
        return [c for c in commands if not isinstance(c, Report)]


@pytest.fixture
def running() -> Story:
    story = Story()
    story.at(0.0, Tick())
    for name in ("redis", "bank", "router"):
        story.at(1.0, Healthy(name))
    return story


def test_the_server_comes_first_and_the_others_when_it_is_ready() -> None:
    story = Story()
    assert story.at(0.0, Tick()) == [Start("redis")]
    assert story.at(0.5, Tick()) == []
    assert story.at(1.0, Healthy("redis")) == [Start("bank"), Start("router")]


def test_all_ready_is_said_once() -> None:
    story = Story()
    story.at(0.0, Tick())
    story.at(1.0, Healthy("redis"))
    assert story.at(2.0, Healthy("router")) == []
    assert story.at(3.0, Healthy("bank")) == [AllReady()]
    story.at(4.0, Exited("bank", 1, "boom"))
    story.at(6.0, Tick())
    assert story.at(7.0, Healthy("bank")) == []


def test_a_dead_service_is_started_again_after_a_growing_wait(running: Story) -> None:
    assert running.at(10.0, Exited("router", 137, "")) == []
    assert running.at(10.9, Tick()) == []
    assert running.at(11.0, Tick()) == [Start("router")]
    running.at(12.0, Exited("router", 1, "boom"))
    assert running.at(13.9, Tick()) == []
    assert running.at(14.0, Tick()) == [Start("router")]


def test_a_service_waits_for_a_server_that_is_being_restarted(running: Story) -> None:
    running.at(10.0, Exited("redis", 137, ""))
    running.at(10.0, Exited("router", 1, "no server"))
    assert running.at(11.5, Tick()) == [Start("redis")]
    assert running.at(12.0, Tick()) == []
    assert running.at(12.5, Healthy("redis")) == [Start("router")]


def test_too_many_deaths_end_everything_with_the_last_words(running: Story) -> None:
    for now in (10.0, 20.0):
        running.at(now, Exited("router", 1, "boom"))
        running.at(now + 5, Tick())
    assert running.at(30.0, Exited("router", 1, "the disk is full")) == [Terminate("bank")]
    running.at(30.5, Exited("bank", 0, ""))
    assert running.at(31.0, Exited("redis", 0, "")) == [
        Finish(2, "router ended 3 times within 100 s, last with status 1: the disk is full")
    ]


def test_old_deaths_are_forgotten(running: Story) -> None:
    for now in (10.0, 60.0, 115.0):
        assert running.at(now, Exited("router", 1, "boom")) == []
        assert running.at(now + 5, Tick()) == [Start("router")]


def test_a_persons_message_at_the_start_ends_everything_as_it_stands() -> None:
    story = Story()
    story.at(0.0, Tick())
    story.at(1.0, Healthy("redis"))
    line = "router: router.listen = '127.0.0.1:7400': the port is taken → choose another"
    assert story.at(2.0, Exited("router", 2, line)) == [Terminate("bank")]
    story.at(2.5, Exited("bank", 0, ""))
    assert story.at(3.0, Exited("redis", 0, "")) == [Finish(2, line)]


def test_status_2_of_a_service_that_was_ready_is_a_death_like_any_other(running: Story) -> None:
    assert running.at(10.0, Exited("bank", 2, "the server is away")) == []
    assert running.at(11.0, Tick()) == [Start("bank")]


def test_a_service_that_never_gets_ready_ends_everything() -> None:
    story = Story()
    story.at(0.0, Tick())
    story.at(1.0, Healthy("redis"))
    commands = story.at(11.1, Tick())
    assert commands[0] == Terminate("router")
    story.at(11.2, Exited("router", 0, ""))
    story.at(11.3, Exited("bank", 0, ""))
    [finish] = story.at(11.4, Exited("redis", 0, ""))
    assert isinstance(finish, Finish)
    assert "bank is not ready after 10 s" in finish.line


def test_a_stop_goes_router_then_bank_then_server(running: Story) -> None:
    assert running.at(10.0, StopAsked()) == [Terminate("router")]
    assert running.at(10.2, Exited("router", 0, "")) == [Terminate("bank")]
    assert running.at(10.4, Exited("bank", 0, "")) == [Terminate("redis")]
    assert running.at(10.6, Exited("redis", 0, "")) == [Finish(0, "")]


def test_a_slow_router_does_not_hold_up_the_bank_for_ever(running: Story) -> None:
    running.at(10.0, StopAsked())
    assert running.at(11.4, Tick()) == []
    assert running.at(11.5, Tick()) == [Terminate("bank")]


def test_what_ignores_the_request_is_killed_when_the_grace_is_over(running: Story) -> None:
    running.at(10.0, StopAsked())
    running.at(12.0, Exited("router", 0, ""))
    assert running.at(14.9, Tick()) == []
    assert running.at(15.0, Tick()) == [Kill("bank")]
    assert running.at(15.1, Tick()) == []


def test_what_was_never_ready_gets_less_grace() -> None:
    story = Story()
    story.at(0.0, Tick())
    story.at(1.0, Healthy("redis"))
    story.at(10.0, StopAsked())
    story.at(10.1, Exited("router", 0, ""))
    assert story.at(12.9, Tick()) == []
    assert story.at(13.0, Tick()) == [Kill("bank")]


def test_a_stubborn_server_is_killed_too(running: Story) -> None:
    running.at(10.0, StopAsked())
    running.at(11.0, Exited("router", 0, ""))
    assert running.at(12.0, Exited("bank", 0, "")) == [Terminate("redis")]
    assert running.at(13.9, Tick()) == []
    assert running.at(14.0, Tick()) == [Kill("redis")]


def test_a_second_request_kills_at_once(running: Story) -> None:
    running.at(10.0, StopAsked())
    killed = running.at(10.1, StopAsked())
    assert killed == [Kill("router"), Kill("bank"), Kill("redis")]


def test_a_stop_while_a_service_waits_for_its_restart_does_not_start_it(running: Story) -> None:
    running.at(10.0, Exited("router", 1, "boom"))
    assert running.at(10.5, StopAsked()) == [Terminate("bank")]
    assert Start("router") not in running.at(13.0, Tick())


def test_a_process_that_cannot_be_killed_does_not_hold_the_stop(running: Story) -> None:
    running.at(10.0, StopAsked())
    running.at(11.0, Exited("router", 0, ""))
    running.at(15.0, Tick())
    [finish] = running.at(19.0, Tick())
    assert finish == Finish(2, "could not be ended: redis, bank")


def test_a_remark_stands_beside_the_time_that_a_start_took(running: Story) -> None:
    running.at(10.0, Exited("router", 137, ""))
    running.at(11.0, Tick())
    running.at(13.5, Healthy("router", "stands by"))
    assert running.told[-1] == Report("router", "ready", "2.5 s, stands by")


def test_beside_a_server_of_others_every_service_has_its_whole_grace() -> None:
    alone = (ServiceRule("bank", outlives=("router",)), ServiceRule("router"))
    story = Story(Rules(alone, grace_s=6.0, last_s=1.5, drain_s=1.5))
    story.at(0.0, Tick())
    for name in ("bank", "router"):
        story.at(1.0, Healthy(name))
    assert story.at(10.0, StopAsked()) == [Terminate("router")]
    assert story.at(11.5, Tick()) == [Terminate("bank")]
    assert story.at(15.9, Tick()) == []
    assert story.at(16.0, Tick()) == [Kill("router"), Kill("bank")]


PAIR = Rules(
    (
        ServiceRule("redis", last=True),
        ServiceRule("box", after=("redis",), outlives=("router", "router-2")),
        ServiceRule("router", after=("redis",)),
        ServiceRule("router-2", after=("redis", "router")),
    ),
    backoff_s=1.0,
)


@pytest.fixture
def pair() -> Story:
    story = Story(PAIR)
    story.at(0.0, Tick())
    for name in ("redis", "box", "router", "router-2"):
        story.at(1.0, Healthy(name))
    return story


def test_the_standby_starts_when_the_first_leads() -> None:
    story = Story(PAIR)
    story.at(0.0, Tick())
    assert story.at(1.0, Healthy("redis")) == [Start("box"), Start("router")]
    story.at(2.0, Healthy("box"))
    assert story.at(3.0, Healthy("router")) == [Start("router-2")]
    assert story.at(4.0, Healthy("router-2", "stands by")) == [AllReady()]


def test_the_first_of_a_pair_comes_back_without_waiting_for_the_second(pair: Story) -> None:
    pair.at(10.0, Exited("router", 137, ""))
    assert pair.at(11.0, Tick()) == [Start("router")]


def test_a_pair_stops_in_one_breath_so_that_none_takes_over(pair: Story) -> None:
    assert pair.at(10.0, StopAsked()) == [Terminate("router-2"), Terminate("router")]
    pair.at(10.1, Exited("router-2", 0, ""))
    assert pair.at(10.2, Exited("router", 0, "")) == [Terminate("box")]


def test_a_former_owner_that_was_fenced_is_started_again(pair: Story) -> None:
    assert pair.at(10.0, Exited("router", 2, "router: a newer router leads")) == []
    assert pair.at(11.0, Tick()) == [Start("router")]


def test_a_stop_before_anything_started_finishes_at_once() -> None:
    assert Story().at(0.0, StopAsked()) == [Finish(0, "")]


def test_what_cannot_be_started_is_tried_on_and_told_once(running: Story) -> None:
    """A full disk: somebody may make room, so these are no deaths."""
    running.at(10.0, Exited("router", 137, "killed"))
    before, starts = len(running.told), 0
    for second in range(11, 60):
        for command in running.at(float(second), Tick()):
            assert command == Start("router")
            starts += 1
            assert running.at(float(second), NotStarted("router", "no space left")) == []
    assert 20 < starts <= 49 / RULES.again_s + 1
    assert [r.detail for r in running.told[before:] if r.detail] == ["no space left"]
    running.at(62.0, Tick())
    running.at(63.0, Healthy("router"))
    assert running.told[-1].phase == "ready"


def test_what_cannot_be_started_for_long_ends_all_with_the_reason(running: Story) -> None:
    running.at(10.0, Exited("router", 137, "killed"))
    running.at(12.0, Tick())
    running.at(12.0, NotStarted("router", "no space left"))
    running.at(700.0, Tick())
    assert Terminate("bank") in running.at(700.0, NotStarted("router", "no space left"))


def test_a_start_that_failed_while_all_is_stopped_is_gone(running: Story) -> None:
    running.at(10.0, Exited("router", 137, "killed"))
    running.at(11.0, Tick())
    running.at(11.0, StopAsked())
    running.at(11.0, NotStarted("router", "no space left"))
    assert [r.phase for r in running.told if r.service == "router"][-1] == "gone"
