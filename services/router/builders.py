"""Tasks that no sandbox host can ever start: an unknown image, too high a limit, a Dockerfile that
only an image builder can read.

Owns: the check at the front door. Promise: pure; a task set that holds a task which no announced
host could start is refused whole, with the words of the host, before anything is written. Does not
cover: which host gets an episode (fleet.py), what a host can make (muster.box_offer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from muster import box_offer
from muster.errors import InvalidInput
from muster.taskset import Task, refused_of
from muster.types import Limits


def announced(info: Mapping[str, str]) -> bool:
    """Whether a sandbox host with that information builds whole Dockerfiles."""
    return box_offer.read(info).builds


def check(tasks: Iterable[Task], hosts: Iterable[Mapping[str, str]], asked: Limits) -> None:
    """Raise InvalidInput for the tasks that no host can start, by what the hosts tell.

    asked: what the router asks for in each box. Without any host only what a builder alone could
    read is refused.
    """
    offers = [box_offer.read(info) for info in hosts] or [box_offer.Offer()]
    refused = [
        (task.name, error) for task in tasks if (error := _refusal(task, offers, asked)) is not None
    ]
    if refused:
        raise refused_of(refused, "submission")


def _refusal(task: Task, offers: Sequence[box_offer.Offer], asked: Limits) -> InvalidInput | None:
    """Why the last of the hosts refuses it; None when one takes it."""
    found: InvalidInput | None = None
    for offer in offers:
        try:
            offer.check(task, asked)
        except InvalidInput as error:
            problem = f"task {task.name}: no sandbox host can start it: {error.problem}"
            found = InvalidInput(
                problem, field=error.field, value=error.value, way_out=error.way_out
            )
        else:
            return None
    return found
