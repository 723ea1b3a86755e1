"""Routers that die between any two effects, boxes that vanish: against oracles that remember.

The world's replica is a function of the context, its boxes are functions of what ran in them; so
every attempt that ends has the same tokens as one that nothing disturbed, or something was lost,
doubled or replayed wrongly. Effects of a dead router's last calls may still happen after its death,
unless the host has heard of its successor.
"""

from __future__ import annotations

import os
import random
import zlib
from typing import Any

import msgspec
import pytest

from muster.types import FinishReason, OutcomeLabel, Segment, VersionSpan
from services.router import chat
from services.router import events as e
from services.router.conversation import Conversation
from services.router.machine import RouterMachine
from services.router.recovery import AttemptSeen, restore_siblings
from services.router.rules import RouterRules
from tests.unit.router.test_conversation import Letters, said
from tests.unit.router.world import job, verdict

SIZE, STEPS = 2, 4000
# Of each of the 4 settings; MUSTER_TEST_EXAMPLES is for all of them together.
SEEDS = int(os.environ.get("MUSTER_TEST_EXAMPLES", "240")) // 4
JOB = job(groups=2, size=SIZE, max_turns=7)


class Box:
    """What ran, in order; its output tells all of that. Each turn runs once."""

    def __init__(self, attempt: str):
        self.attempt, self.ran = attempt, list[tuple[int, str]]()
        self.kept: dict[int, tuple[str, str]] = {}

    def run(self, command: e.Exec) -> tuple[str, bool]:
        kept = self.kept.get(command.turn)
        if kept is not None:
            assert kept[0] == command.command, "another command under a turn that has run"
            return kept[1], True
        assert not self.ran or command.turn > self.ran[-1][0], "a turn before one that has run"
        self.ran.append((command.turn, command.command))
        output = str(zlib.crc32(repr(self.ran).encode()) % 9973)
        self.kept[command.turn] = command.command, output
        return output, False


class Store:
    """What is durable, in order, each dedupe field once."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.groups: list[str] = []
        self.attempts: dict[str, dict[tuple[int, int], AttemptSeen]] = {}
        self.labels: dict[str, dict[tuple[int, int], OutcomeLabel]] = {}
        self.payloads: dict[tuple[str, int], tuple[Segment, ...]] = {}
        self.replies: dict[tuple[str, int], dict[str, int]] = {}

    def new(self, dedupe: str) -> bool:
        """False for a repeat."""
        known = dedupe in self.seen
        self.seen.add(dedupe)
        return not known

    def change(self, episode: Any, change: Any) -> None:
        place = (episode.sibling, episode.attempt)
        attempts = self.attempts.setdefault(episode.group, {})
        attempts[place] = change(attempts.get(place, AttemptSeen(*place)))

    def tokens(self) -> dict[str, list[int]]:
        """Of every attempt with a valid label."""
        found = {}
        for group, labels in self.labels.items():
            for (sibling, attempt), label in labels.items():
                name = f"{group}.{sibling}.{attempt}"
                if label.outcome.valid:
                    turns = sorted(t for n, t in self.payloads if n == name)
                    assert turns == list(range(len(turns))), "a turn is missing"
                    ids = [self.payloads[name, t] for t in turns]
                    found[name] = [i for turn in ids for s in turn for i in s.token_ids]
        return found


class World:
    """One store, two hosts, routers one after another."""

    def __init__(self, seed: int, *, deaths: float, losses: float):
        self.chance, self.deaths, self.losses = random.Random(seed), deaths, losses
        self.store = Store()
        self.hosts: dict[str, dict[str, Box]] = {"h0": {}, "h1": {}}
        self.heard = dict.fromkeys(self.hosts, 0)  # newest epoch
        self.made = self.epoch = 0
        self.now = 0.0
        self.ghosts: list[e.RouterCommand] = []
        self.begin()

    # -- routers -----------------------------------------------------------------------

    def begin(self) -> None:
        """A new router reads the store."""
        self.epoch += 1
        rules = RouterRules(run="r", owner_epoch=self.epoch, groups_per_batch=2, repairs_max=60)
        self.machine = RouterMachine(rules)
        self.talks: dict[str, Conversation] = {}
        self.commands: list[e.RouterCommand] = []
        self.events: list[e.RouterEvent] = []
        self.feed(e.ReplicasListed((e.Replica("r0", "r0"),)))
        self.feed(e.HostsListed(tuple(e.Host(h, h) for h in self.hosts)))
        self.feed(JOB)
        for group in self.store.groups:
            told = restore_siblings(
                SIZE,
                self.store.attempts.get(group, {}).values(),
                self.store.labels.get(group, {}),
                60,
            )
            index = int(group.rpartition("-")[2])
            self.feed(e.GroupRestored(group, "j", index, self.with_payloads(group, told)))
        self.feed(e.RecoveryEnded())

    def with_payloads(self, group: str, siblings: Any) -> tuple[e.SiblingRestored, ...]:
        for number, told in enumerate(siblings):
            if told.resume is None:
                continue
            assert not told.resume.broken
            name = f"{group}.{number}.{told.attempt}"
            count = len(told.resume.turns) + (told.resume.intent is not None)
            payloads = [self.store.payloads[name, turn] for turn in range(count)]
            answers = [chat.answer(turn) for turn in told.resume.turns][: count - 1]
            self.talks[name] = Conversation(Letters())
            self.talks[name].restore(opening(), payloads, answers)
        return tuple(siblings)

    def feed(self, event: e.RouterEvent) -> None:
        self.commands += self.machine.handle(event, self.now)

    def die(self) -> None:
        self.ghosts += [c for c in self.commands if isinstance(c, e.Exec | e.AcquireBox)]
        self.begin()

    # -- effects -----------------------------------------------------------------------

    def effect(self, command: e.RouterCommand) -> e.RouterEvent | None:
        match command:
            case e.OpenGroup():
                if self.store.new(command.group):
                    self.store.groups.append(command.group)
                return e.GroupRecorded(command.group)
            case e.AcquireBox() | e.Exec() | e.Verify() | e.ReleaseBox():
                return self.on_host(command)
            case e.Generate():
                return self.generate(command)
            case e.RecordIntent() | e.RecordTurn():
                return self.record_turn(command)
            case e.RecordRestored():
                if self.store.new(f"{command.episode.id}#restored/{command.repair}"):
                    in_box = (command.host, command.box)
                    repair = command.repair
                    self.store.change(command.episode, lambda a: a.restored(repair).in_box(*in_box))
                return e.RestoredRecorded(command.episode, command.repair)
            case e.RecordEpisode():
                return self.record_end(command)
            case _:
                return None

    def on_host(self, command: Any) -> e.RouterEvent | None:
        host, epoch = command.host, command.episode.owner_epoch
        if epoch < self.heard.get(host, 0):
            return None  # fenced: it comes from a dead router
        self.heard[host] = epoch
        boxes = self.hosts[host]
        match command:
            case e.AcquireBox():
                return self.acquire(command, boxes)
            case e.ReleaseBox():
                boxes.pop(command.box, None)
                return None
        box = boxes.get(command.box)
        if isinstance(command, e.Verify):
            if box is None:
                return e.VerifyFailed(command.episode, "no box", e.Loss.BOX_GONE)
            return verdict(command)
        if box is None:
            gone = e.Loss.BOX_GONE
            return e.StepFailed(command.episode, command.turn, "no box", gone, command.box)
        assert box.attempt == command.episode.id
        output, repeated = box.run(command)
        told = {"episode": command.episode, "turn": command.turn, "output": output}
        return msgspec.structs.replace(STEP, **told, repeated=repeated, box=command.box)

    def acquire(self, command: e.AcquireBox, boxes: dict[str, Box]) -> e.RouterEvent:
        name = command.episode.id
        for known, box in list(boxes.items()):
            if box.attempt == name and command.fresh:
                del boxes[known]
            elif box.attempt == name:
                return e.BoxAcquired(command.episode, command.host, known, 0.0, 0.0)
        self.made += 1
        boxes[f"b{self.made}"] = Box(name)
        return e.BoxAcquired(command.episode, command.host, f"b{self.made}", 0.0, 0.0)

    def generate(self, command: e.Generate) -> e.RouterEvent:
        place = (command.episode.id, command.turn)
        assert place not in self.store.payloads, "a recorded reply is asked for again"
        talk = self.talks.setdefault(command.episode.id, Conversation(Letters()))
        if command.turn == 0:
            talk.open(command.messages)
        else:
            for message in command.messages:
                talk.observe(message)
        context = talk.context
        mute = command.turn == 2
        text = "hmm" if mute else f"```bash\nc{sum(context) % 97}\n```"
        ids, logprobs = said("DONE" if command.turn == 5 else text)
        talk.reply(ids, logprobs, (VersionSpan(0, 0, len(ids), 0),))
        usage = {"prompt_tokens": len(context), "sampled_tokens": len(ids)}
        self.store.replies[place] = usage
        text = Letters().decode(ids)
        times = {"start_unix_s": 0.0, "queue_s": 0.0, "prefill_s": 0.0, "end_unix_s": 0.0}
        return e.Generated(*place_of(command), text, FinishReason.STOP, **usage, **times)

    def record_turn(self, command: e.RecordIntent | e.RecordTurn) -> e.RouterEvent:
        episode, turn = command.episode, command.turn
        usage = self.store.replies[episode.id, turn]
        intent = isinstance(command, e.RecordIntent)
        new = self.store.new(f"{episode.id}#{turn}{'/intent' if intent else ''}")
        if new and (intent or not command.command):
            self.store.payloads[episode.id, turn] = self.talks[episode.id].take_segments()
        in_box = (command.host, command.box)
        if isinstance(command, e.RecordIntent):
            told = e.IntentSeen(turn, command.command, command.timeout_s, **usage)
            if new:
                self.store.change(episode, lambda a: a.intended(told).in_box(*in_box))
            return e.IntentRecorded(episode, turn)
        done = e.TurnSeen(
            turn, **usage, done=turn == 5, command=command.command, output=command.output
        )
        if new:
            self.store.change(episode, lambda a: a.turned(done).in_box(*in_box))
        return e.TurnRecorded(episode, turn)

    def record_end(self, command: e.RecordEpisode) -> e.RouterEvent:
        episode = command.episode
        assert command.label.cause != "replay_differs", "replayed otherwise than it had run"
        if self.store.new(f"{episode.id}#end"):
            self.store.change(episode, lambda seen: seen.ended(command.turns))
            labels = self.store.labels.setdefault(episode.group, {})
            labels[episode.sibling, episode.attempt] = command.label
        return e.EpisodeRecorded(episode)

    # -- time --------------------------------------------------------------------------

    def over(self) -> bool:
        labels = [x for found in self.store.labels.values() for x in found.values()]
        return sum(x.outcome.valid for x in labels) == 2 * SIZE and not (
            self.commands or self.events or self.machine._episodes
        )

    def step(self) -> None:
        x = self.chance.random()
        if x < self.deaths:
            self.die()
        elif x < self.deaths + self.losses:
            self.chance.choice(list(self.hosts.values())).clear()
        elif self.ghosts and x < 0.3:
            self.effect(self.ghosts.pop(self.chance.randrange(len(self.ghosts))))
        elif self.commands and x < 0.65:
            at = self.chance.randrange(len(self.commands))
            event = self.effect(self.commands.pop(at))
            if event is not None:
                self.events.append(event)
        elif self.events:
            self.feed(self.events.pop(self.chance.randrange(len(self.events))))
        else:
            self.now += 0.6
            self.feed(e.Tick())

    def run(self) -> World:
        for _ in range(STEPS):
            if self.over():
                return self
            self.step()
        self.deaths = self.losses = 0.0
        for _ in range(STEPS):
            if self.over():
                return self
            self.step()
        raise AssertionError("stalled")


def place_of(command: e.Generate) -> tuple[Any, int]:
    return command.episode, command.turn


def opening() -> tuple[e.Message, ...]:
    return chat.opening(JOB.job.tasks[0].instruction)


STEP = e.StepFinished(
    episode=None,  # type: ignore[arg-type]
    turn=0,
    exit_code=0,
    limit=e.TurnSeen(0, 0, 0).limit,
    wall_s=0.0,
    cpu_s=0.0,
    output="",
    box_broken=False,
    start_unix_s=0.0,
    end_unix_s=0.0,
)
WANT = next(iter(World(0, deaths=0.0, losses=0.0).run().store.tokens().values()))


@pytest.mark.parametrize(
    ("deaths", "losses"), [(0.0, 0.0), (0.02, 0.0), (0.0, 0.02), (0.02, 0.01)], ids=str
)
def test_no_turn_is_lost_doubled_or_changed_by_deaths_of_routers_and_boxes(
    deaths: float, losses: float
) -> None:
    for seed in range(SEEDS):
        world = World(seed, deaths=deaths, losses=losses)
        try:
            world.run()
            found = world.store.tokens()
            assert len(found) == 2 * SIZE
            assert all(ids == WANT for ids in found.values())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
