"""A tiny world around the router's machine: every command is answered at once, as scripted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from muster.types import FinishReason, Purpose, SamplingParams, StepLimit, VerdictStatus
from services.router import events as e
from services.router.machine import RouterMachine
from services.router.rules import RouterRules

BLOCK = "```bash\necho hi\n```"
Answer = Callable[[e.RouterCommand], e.RouterEvent | None]


def job(
    name: str = "j",
    *,
    groups: int = 1,
    size: int = 2,
    max_turns: int = 1,
    purpose: Purpose = Purpose.TRAIN,
) -> e.JobSubmitted:
    task = e.TaskInfo("t", "d" * 64, "Do it.", max_turns=max_turns)
    spec = e.JobSpec(name, (task,), groups, size, SamplingParams(), 0.0, purpose=purpose)
    return e.JobSubmitted(spec)


class World:
    """Feeds events, answers commands, remembers all of them."""

    def __init__(self, **rules: object):
        self.machine = RouterMachine(RouterRules(run="r", owner_epoch=7, **rules))  # type: ignore[arg-type]
        self.now = 100.0
        self.log: list[e.RouterCommand] = []
        self.answers: dict[type, Answer] = {}
        self.queue: deque[e.RouterEvent] = deque()

    def start(self, *, replicas: int = 1, hosts: int = 1) -> World:
        listed = tuple(e.Replica(f"r{i}", f"r{i}:1") for i in range(replicas))
        boxes = tuple(e.Host(f"h{i}", f"h{i}:1") for i in range(hosts))
        return self.feed(e.ReplicasListed(listed), e.HostsListed(boxes), e.RecoveryEnded())

    def feed(self, *events: e.RouterEvent) -> World:
        """Handle events and everything that follows from them."""
        self.queue.extend(events)
        while self.queue:
            for command in self.machine.handle(self.queue.popleft(), self.now):
                self.log.append(command)
                answer = self.answers.get(type(command), default)(command)
                if answer is not None:
                    self.queue.append(answer)
        return self

    def wait(self, seconds: float) -> World:
        self.now += seconds
        return self.feed(e.Tick())

    def on(self, kind: type, answer: Answer) -> World:
        self.answers[kind] = answer
        return self

    def sent(self, kind: type) -> list:
        return [c for c in self.log if isinstance(c, kind)]


def generated(command: e.Generate, text: str = BLOCK, **fields: object) -> e.Generated:
    given: dict = {
        "finish": FinishReason.STOP,
        "prompt_tokens": 10,
        "sampled_tokens": 5,
        "start_unix_s": 1.0,
        "queue_s": 0.0,
        "prefill_s": 0.1,
        "end_unix_s": 2.0,
        "retry": command.retry,
    } | fields
    return e.Generated(command.episode, command.turn, text, **given)


def failed(command: e.Generate, detail: str = "gone", *, full: bool = False) -> e.GenerateFailed:
    at = (command.episode, command.turn, command.replica)
    return e.GenerateFailed(*at, detail, full=full, retry=command.retry)


def stepped(command: e.Exec, **fields: object) -> e.StepFinished:
    given: dict = {
        "exit_code": 0,
        "limit": StepLimit.NONE,
        "wall_s": 0.1,
        "cpu_s": 0.1,
        "output": "hi",
        "box_broken": False,
        "start_unix_s": 2.0,
        "end_unix_s": 2.1,
    } | fields
    return e.StepFinished(command.episode, command.turn, **given)


def verdict(
    command: e.Verify, reward: float = 1.0, status: VerdictStatus = VerdictStatus.REWARDED
) -> e.VerdictGiven:
    return e.VerdictGiven(command.episode, status, reward, "", 3.0, 3.5)


def default(command: e.RouterCommand) -> e.RouterEvent | None:
    match command:
        case e.OpenGroup():
            return e.GroupRecorded(command.group)
        case e.AcquireBox():
            return e.BoxAcquired(command.episode, command.host, "box", 0.0, 0.5)
        case e.Generate():
            return generated(command)
        case e.Exec():
            return stepped(command)
        case e.Verify():
            return verdict(command)
        case e.ProbeReplica():
            return e.ReplicaProbed(command.replica, command.life, True)
        case _:
            return recorded(command)


def recorded(command: e.RouterCommand) -> e.RouterEvent | None:
    match command:
        case e.RecordIntent():
            return e.IntentRecorded(command.episode, command.turn)
        case e.RecordRestored():
            return e.RestoredRecorded(command.episode, command.repair)
        case e.RecordTurn():
            return e.TurnRecorded(command.episode, command.turn)
        case e.RecordEpisode():
            return e.EpisodeRecorded(command.episode)
        case _:
            return None
