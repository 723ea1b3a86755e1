"""What a caller or a task's author got wrong, or has to wait for, with the way out. Pure."""

from __future__ import annotations

from muster import fetching
from muster.errors import Exhausted, Fenced, InvalidInput, MusterError, Refused, Unavailable
from muster.types import EpisodeKey
from services.sandbox.box import Evidence
from services.sandbox.config import SandboxConfig
from services.sandbox.events import RefuseTicket, identity

_SHOWN = 500  # characters of output in an error
_WAITED_MAX_S = 1e6


def step(config: SandboxConfig, command: str, timeout_s: float) -> None:
    """Raises InvalidInput for a step that cannot be run as it was asked for."""
    most = config.step_timeout_s_max
    if not 0 < timeout_s <= most:
        raise InvalidInput(
            f"a step's time limit is above 0 and at most {most:g} s",
            field="timeout_s",
            value=timeout_s,
            way_out="ask for less, or raise sandbox.step_timeout_s_max",
        )
    size = len(command.encode())
    if size > config.command_bytes_max or "\0" in command:
        raise InvalidInput(
            f"a command has at most {config.command_bytes_max} bytes and no NUL",
            field="command",
            value=f"{size} bytes",
            way_out="write a file in several steps",
        )


def setup(shown: str, evidence: Evidence, printed: str) -> None:
    """Raises for a RUN line of the task's Dockerfile that did not succeed.

    shown: "FILE line N: " and its command.
    """
    field, _, command = shown.partition(": ")
    if evidence.exit_code == 0 and not evidence.timed_out:
        return
    if evidence.timed_out:
        raise Exhausted(
            "a RUN line of the task took too long",
            field=field,
            value=command[:200],
            way_out="raise sandbox.setup_timeout_s, or make the line quicker",
        )
    said = evidence.broken or printed[-_SHOWN:]
    problem = f"a RUN line of the task ended with {evidence.exit_code}: {said}"
    way_out = "mend the line: boxes have no network, and with the base `host` a read-only /usr"
    tool = fetching.fetches(command)
    if tool or fetching.missed(printed):
        what = f", and {tool} fetches" if tool else ""
        problem = f"{fetching.NO_NETWORK}{what}: {problem}"
        way_out = fetching.COPY_IT
    raise InvalidInput(problem, field=field, value=command[:200], way_out=way_out)


def folder(path: str, field: str) -> None:
    """Raises InvalidInput for a path of a box that cannot be meant."""
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts or "\0" in path or len(path.encode()) > 1024:
        raise InvalidInput(
            "a path of a box is absolute, without '..', and has at most 1024 bytes",
            field=field,
            value=ascii(path)[1:-1][:200],
            way_out="write it from the root of the box",
        )


def fork(key: EpisodeKey, into: EpisodeKey) -> None:
    """Raises InvalidInput for a fork that would be for no attempt of its own."""
    if into.run != key.run or identity(into) == identity(key):
        raise InvalidInput(
            "a box is forked for another attempt of the same run",
            field="into",
            value=into.id,
            way_out="name the attempt that the new box is for",
        )


def capacity(name: str, figure: int, least: int, most: int) -> None:
    """Raises InvalidInput for a figure out of bounds."""
    if not least <= figure <= most:
        raise InvalidInput(
            f"has to be from {least} to {most}", field=name, value=figure, way_out="ask for another"
        )


def waited(seconds: float) -> None:
    """Raise InvalidInput for what no attempt can have waited."""
    if not 0.0 <= seconds <= _WAITED_MAX_S:
        raise InvalidInput(
            f"an attempt can have waited 0 to {_WAITED_MAX_S:g} s",
            field="waited_s",
            value=seconds,
            way_out="leave it out, or give the seconds since it first asked for its box",
        )


def another_box(key: EpisodeKey) -> Refused:
    """The error of an attempt that asks for a box of another task, or with other limits."""
    return Refused(
        "this attempt has a box of another task, or with other limits",
        field="episode",
        value=key.id,
        way_out="go on in that box, or ask for a fresh one, which ends it",
    )


def in_use(key: EpisodeKey) -> Refused:
    """The error of a caller whose attempt has a box that ran steps."""
    return Refused(
        "this attempt has a box that ran steps already",
        field="episode",
        value=key.id,
        way_out="go on in that box, or ask for a fresh one, which ends it",
    )


def busy(problem: str, name: str) -> Refused:
    """The error of a call that cannot be done beside what the box does now."""
    return Refused(problem, field="box", value=name, way_out="wait for it")


def refused(command: RefuseTicket) -> MusterError:
    """The error that a refused caller sees."""
    if command.fenced:
        return Fenced(
            command.problem, field="owner_epoch", way_out="a newer router owns the run: stop"
        )
    return Exhausted(
        command.problem, field="sandbox.boxes_max", way_out="raise it, or add a sandbox host"
    )


def start_trouble(problem: str) -> MusterError:
    """The error of a caller whose box did not start."""
    return Unavailable(
        f"the box did not start: {problem}", way_out="try again, on another host if there is one"
    )
