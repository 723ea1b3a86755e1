"""What people are told of a service that is held up."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from muster.errors import Unavailable
from muster.patience import patiently
from muster.supervise.troubles import Troubles
from muster.telemetry import JsonFormatter

FULL = "the disk is away: no space left on the device → make room"


class Service:
    """One service's log and what is told of it."""

    def __init__(self, folder: Path):
        self.log, self.troubles = folder / "trainer.log", Troubles()
        self.waits("an older process" + 999 * "x")
        self.troubles.started("trainer", self.log)

    def say(self, text: str, **more: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"level": "WARNING", "text": text, **more}) + "\n")

    def waits(self, text: str = FULL, what: str = "the disk", number: int = 1) -> None:
        self.say(text, awaited=what, wait=number)

    def ends(self, what: str = "the disk", number: int = 1, *, back: bool = True) -> None:
        self.say(f"{what} was awaited", awaited=what, wait=number, over=back)

    def look(self) -> str | None:
        return self.troubles.look("trainer", self.log)

    def looks(self, count: int) -> list[str | None]:
        return [self.look() for _ in range(count)]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_what_goes_on_is_told_once_however_far_its_tries_are_apart(service: Service) -> None:
    service.waits()
    service.say("something else")
    assert service.looks(9) == [None, FULL, *[None] * 7]
    service.waits()
    assert service.looks(9) == [None] * 9


def test_waits_that_are_over_soon_are_not_told(service: Service) -> None:
    for _ in range(3):
        service.waits()
        service.ends()
        assert service.look() is None
    service.waits()
    assert service.look() is None
    service.ends()
    assert service.looks(3) == [None] * 3


def test_the_end_of_a_trouble_is_told_once(service: Service) -> None:
    service.waits()
    service.looks(2)
    service.ends()
    assert service.looks(3) == ["", None, None]


def test_of_several_the_longest_is_told_and_then_the_next(service: Service) -> None:
    service.waits("Redis is away", "Redis")
    service.waits("the bank is away", "the bank")
    told = service.looks(3)
    service.waits("the bank is away", "the bank")
    service.ends("Redis")
    assert [*told, *service.looks(2)] == [None, "Redis is away", None, "the bank is away", None]


def test_one_of_several_waiters_that_leaves_ends_nothing(service: Service) -> None:
    for number in (1, 2):
        service.waits(number=number)
    told = service.looks(2)
    service.ends(number=1, back=False)
    told += service.looks(2)
    service.ends(number=2)
    assert [*told, *service.looks(2)] == [None, FULL, None, None, "", None]


def test_who_gave_up_does_not_go_on(service: Service) -> None:
    service.waits()
    told = service.looks(2)
    service.ends(back=False)
    assert [*told, *service.looks(2)] == [None, FULL, None, None]


def test_a_new_process_starts_without_troubles(service: Service) -> None:
    service.waits()
    service.look()
    service.troubles.started("trainer", service.log)
    assert service.looks(3) == [None] * 3


def test_an_end_that_nobody_read_is_taken_for_granted_at_last(service: Service) -> None:
    service.waits()
    service.looks(70)
    service.waits()
    assert service.looks(2) == [None, FULL]


def test_a_rotated_or_absent_or_garbled_log_is_read_as_far_as_it_goes(service: Service) -> None:
    service.log.write_text("")
    service.waits()
    assert service.looks(2) == [None, FULL]
    with service.log.open("ab") as file:
        file.write(b'{"awaited": \xff\n["awaited"]\n{"awaited": null}\n')
    assert service.look() is None
    service.log.unlink()
    assert service.look() is None


def test_a_log_that_grew_a_lot_is_read_in_its_last_part(service: Service) -> None:
    service.say("x" * 200_000)
    service.waits()
    assert service.looks(2) == [None, FULL]


async def test_what_patience_writes_is_what_is_read_here(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    tries, said = 0, list[str | None]()

    async def call() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise Unavailable("no space left", field="checkpoint", way_out="make room")

    with caplog.at_level(logging.WARNING, "patience"):
        await patiently("the disk", call, patience_s=9.0, first_s=0.001)
    for record in caplog.records:
        with service.log.open("a") as file:
            file.write(JsonFormatter("trainer").format(record) + "\n")
        said.append(service.look())
    assert said == [None, "the disk is away: checkpoint = '': no space left → make room", ""]
