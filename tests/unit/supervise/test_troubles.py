"""What people are told of a service that is held up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.supervise.troubles import Troubles

FULL = (
    "the checkpoint folder is away, trying again in {} s: no space left on the device → make room"
)
TOLD = "the checkpoint folder is away: no space left on the device → make room"


class Service:
    """One service's log and what is told of it."""

    def __init__(self, folder: Path):
        self.log, self.troubles = folder / "trainer.log", Troubles()
        self.say("from the process before", "patience")
        self.troubles.started("trainer", self.log)

    def say(self, text: str, logger: str = "trainer") -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"level": "WARNING", "logger": logger, "text": text}) + "\n")

    def waits(self, wait: float = 5.0) -> None:
        self.say(FULL.format(wait), "patience")

    def look(self) -> str | None:
        return self.troubles.look("trainer", self.log)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_what_goes_on_is_told_once_though_its_waits_grow(service: Service) -> None:
    found = []
    for wait in (0.2, 5.0, 5.0, 4.0):
        service.waits(wait)
        service.say("something else")
        found.append(service.look())
    assert found == [None, TOLD, None, None]


def test_a_wait_that_is_over_soon_is_not_told(service: Service) -> None:
    service.waits()
    assert [service.look() for _ in range(6)] == [None] * 6
    service.waits()
    assert service.look() is None


def test_the_end_of_a_trouble_is_told_once(service: Service) -> None:
    for _ in range(2):
        service.waits()
        service.look()
    assert [service.look() for _ in range(5)] == [None, None, "", None, None]


def test_a_try_that_takes_longer_than_a_look_ends_nothing(service: Service) -> None:
    found = []
    for held in (True, True, False, False, True, False, True):
        if held:
            service.waits()
        found.append(service.look())
    assert found == [None, TOLD, None, None, None, None, None]


def test_another_trouble_is_told_in_its_place(service: Service) -> None:
    for _ in range(2):
        service.waits()
        service.look()
    service.say("Redis is away, trying again in 0.1 s: gone → start it", "patience")
    assert service.look() == "Redis is away: gone → start it"


def test_a_rotated_or_absent_or_garbled_log_is_read_as_far_as_it_goes(service: Service) -> None:
    service.waits()
    service.look()
    service.log.write_text("")
    service.waits()
    assert service.look() == TOLD
    with service.log.open("ab") as file:
        file.write(b'{"patience": \xff\n["patience"]\n')
    assert service.look() is None
    service.log.unlink()
    assert service.look() is None


def test_a_log_that_grew_a_lot_is_read_in_its_last_part(service: Service) -> None:
    for _ in range(2):
        service.say("x" * 200_000)
        service.waits()
        found = service.look()
    assert found == TOLD
