"""What a caller or the author of a task got wrong, told with the way out. Pure."""

from __future__ import annotations

from muster.errors import Exhausted, InvalidInput
from services.sandbox.box import Evidence
from services.sandbox.config import SandboxConfig

_SHOWN = 500  # characters of output in an error


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
    """Raises for a RUN line of the task's Dockerfile, `shown`, that did not succeed."""
    if evidence.exit_code == 0 and not evidence.timed_out:
        return
    if evidence.timed_out:
        raise Exhausted(
            "a RUN line of the task took too long",
            field="environment/Dockerfile",
            value=shown[:200],
            way_out="raise sandbox.setup_timeout_s, or make the line quicker",
        )
    said = evidence.broken or printed[-_SHOWN:]
    raise InvalidInput(
        f"a RUN line of the task ended with {evidence.exit_code}: {said}",
        field="environment/Dockerfile",
        value=shown[:200],
        way_out="mend the line: boxes have no network and a read-only /usr",
    )
