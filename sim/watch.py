"""What a router asks of replicas, held against what it has been told: the checks of its requests.

Owns: per router incarnation the requests under way, those it gave up, what it knows of each
replica. Promise: looks at events and commands at the machine's edge and at real contexts, never
into the machine. Does not cover: what becomes durable (checks.py). Numbers go on from there:

14 nothing of a request that was given up is recorded
15 an episode generates on one replica at a time
16 a replica takes turns once a probe of its present life has passed, on a credit that runs
17 weights that are known to be too old give no recorded token
18 what is admitted fits the credit, beside all that is larger
19 nothing counts as cached that was never sent there, or was cleared
20 a box is kept until its attempt's label is durable
21 no request stays where nothing moves, or nobody answers
22 a box is given back once its attempt is over
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from muster.types import EpisodeKey, Segment, SegmentKind
from services.router import events as e
from services.router.rules import RouterRules
from sim.engine import Engines, Request
from sim.work import blocks

_ESTIMATE_TOKENS = 24  # by which the machine's idea of a context may be off
_ASKS_S = 3.0  # a credit that is asked for in vain, and the next
_LATE_S = 2.0  # from one word of a replica to the next, with the way


class Watch:
    """Of one router incarnation; `problem` hears what does not hold."""

    def __init__(self, rules: RouterRules, engines: Engines, problem: Callable[[str], None]):
        self._rules, self._engines, self._problem = rules, engines, problem
        self._told: dict[str, tuple[e.ReplicaTold, float]] = {}
        self._proven: set[tuple[str, str]] = set()  # replica, life
        self._behind: dict[str, float] = {}  # replica → since when it is known to be
        self._left: dict[str, dict[str, int]] = {}  # episode → tokens of former turns by replica
        self._boxes: dict[str, str] = {}  # episode → the box it was given last
        self._boxless: set[str] = set()  # episodes that gave back a box before their end
        self._moved: dict[str, float] = {}  # replica → when its engine was seen to move
        self._still: dict[str, float] = {}  # replica → for how long it had stood still, at its news
        self._silent: dict[str, float] = {}  # replica → since when it does not answer
        self._other_box = False  # one came that nobody waits for any more
        self._version = 0
        self._serves: dict[str, int] = {}  # replica → the newest version it is known to serve
        self._flying: dict[str, tuple[Request, str, int]] = {}  # episode → request, replica, size
        self._sent_at: dict[str, float] = {}  # episode → when its newest request went out
        self._asked: dict[Request, str] = {}
        self._given_up: set[Request] = set()
        self._sent: defaultdict[str, set[int]] = defaultdict(set)  # replica → marks of blocks
        self._quiet: dict[str, float] = {}  # episode → when something was heard of it
        self._first: set[str] = set()  # episodes that go before all others
        self._judged: set[str] = set()  # episodes whose label is being written
        self._size = rules.prefix_block_tokens

    # events

    def heard(self, event: e.RouterEvent, commands: Sequence[e.RouterCommand], now: float) -> None:
        """An event, and what the machine made of it."""
        match event:
            case e.Generated():
                self._on_generated(event, commands, now)
            case e.GenerateFailed():
                self._ended((event.episode.id, event.turn, event.retry), given_up=True)
            case e.ContextFull():
                self._flying.pop(event.episode.id, None)
            case e.BoxAcquired():
                self._boxes[event.episode.id] = event.box
            case e.EpisodeRecorded():
                self._on_recorded(event, commands)
            case _:
                self._news(event, now)
        self._judged |= {c.episode.id for c in commands if isinstance(c, e.RecordEpisode)}
        self._other_box = isinstance(event, e.BoxAcquired | e.BoxesFound)
        if isinstance(event, e.EpisodeEvent) and not isinstance(event, e.GenerateFailed):
            self._quiet[event.episode.id] = now  # a failure ends no turn: it waits on

    def _news(self, event: e.RouterEvent, now: float) -> None:
        """Of replicas, versions and groups that are over."""
        match event:
            case e.ReplicaTold():
                self._on_told(event, now)
            case e.ReplicaSilent():
                self._on_silent(event, now)
            case e.ReplicaProbed() if event.passed:
                self._proven.add((event.replica, event.life))
            case e.VersionPublished() if event.version > self._version:
                self._version = event.version
                for replica in [r for r in self._sent if self._serves.get(r, 0) < event.version]:
                    del self._sent[replica]
            case e.GroupRestored():
                self._on_restored(event, now)
            case e.FateRecorded():  # so all its labels are durable
                self._judged = {i for i in self._judged if not i.startswith(f"{event.group}.")}

    def _on_restored(self, event: e.GroupRestored, now: float) -> None:
        """What a former router sent may lie where that says; nobody can tell before a reply."""
        for number, told in enumerate(event.siblings):
            record = told.resume
            if record is None:
                continue
            id_ = f"{event.group}.{number}.{told.attempt}"
            self._quiet.setdefault(id_, now)  # it may be held at once, and nothing is heard of it
            left = self._left[id_] = {}
            for turn in (*record.turns, *((record.intent,) if record.intent else ())):
                tokens = turn.prompt_tokens + turn.sampled_tokens + _ESTIMATE_TOKENS
                left[turn.replica] = max(left.get(turn.replica, 0), tokens)

    def _on_recorded(self, event: e.EpisodeRecorded, commands: Sequence[e.RouterCommand]) -> None:
        """The label is durable: its box is of no use any more."""
        id_ = event.episode.id
        self._judged.discard(id_)
        box = self._boxes.pop(id_, "")
        given_back = any(isinstance(c, e.ReleaseBox) and c.episode.id == id_ for c in commands)
        if box and not given_back and id_ not in self._boxless:
            self._problem(f"22: {id_} is over, and its box {box} is not given back")

    def _look(self, replica: str, now: float) -> None:
        """More news of a replica that by the news before stood still for too long."""
        for episode, (request, where, _) in self._flying.items():
            still = min(self._still.get(replica, 0.0), now - self._sent_at[episode])
            if where == replica and self._rules.probes and still > self._patience_s + _ASKS_S:
                self._problem(f"21: {request} stays at {replica}, still for {still:.1f} s")

    def _on_silent(self, event: e.ReplicaSilent, now: float) -> None:
        self._look(event.replica, now)
        since = self._silent.setdefault(event.replica, now)
        self._still[event.replica] = now - since

    def _on_told(self, event: e.ReplicaTold, now: float) -> None:
        before = self._told.get(event.replica)
        self._look(event.replica, now)
        self._silent.pop(event.replica, None)
        steps = before[0].steps if before is not None else -1
        if not event.running or event.steps != steps or event.life != self._life(event.replica):
            self._moved[event.replica] = now
        self._still[event.replica] = now - self._moved[event.replica]
        if before is not None and (before[0].life, before[0].block_size) != (
            event.life,
            event.block_size,
        ):
            self._sent.pop(event.replica, None)
            self._serves[event.replica] = event.version
        self._newer(event.replica, event.version)
        self._told[event.replica] = (event, now)
        if event.version < self._version:
            self._behind.setdefault(event.replica, now)
        else:
            self._behind.pop(event.replica, None)

    def _on_generated(
        self, event: e.Generated, commands: Sequence[e.RouterCommand], now: float
    ) -> None:
        request = (event.episode.id, event.turn, event.retry)
        self._first.discard(event.episode.id)
        self._left.pop(event.episode.id, None)
        replica = self._asked.get(request, "")
        self._newer(replica, event.version)
        taken = any(
            isinstance(c, e.RecordIntent | e.RecordTurn) and c.episode == event.episode
            for c in commands
        )
        if taken and request in self._given_up:
            self._problem(f"14: the answer to {request} was taken, and it was given up")
        old_s = self._old_s(replica)
        if taken and event.version < self._version and old_s > self._patience_s:
            self._problem(f"17: {request} was taken from {replica}, old for {old_s:.1f} s")
        self._ended(request)

    def _life(self, replica: str) -> str:
        told = self._told.get(replica)
        return told[0].life if told is not None else ""

    def _newer(self, replica: str, version: int) -> None:
        """Newer weights are there for the first time: the cache is empty."""
        if version > self._serves.get(replica, 0):
            self._serves[replica] = version
            self._sent.pop(replica, None)

    @property
    def _patience_s(self) -> float:
        return self._rules.wedge_s + _LATE_S

    def _ended(self, request: Request, *, given_up: bool = False) -> None:
        if given_up:
            self._given_up.add(request)
        flying = self._flying.get(request[0])
        if flying is not None and flying[0] == request:
            del self._flying[request[0]]

    # commands

    def gave_up(self, command: e.AbortGenerate) -> None:
        """Nothing of it may be taken any more."""
        request = (command.episode.id, command.turn, command.retry)
        self._ended(request, given_up=True)

    def released(self, command: e.ReleaseBox) -> None:
        """Its box is given back: not before its label is durable."""
        self._boxless.add(command.episode.id)
        if command.episode.id in self._judged and not self._other_box:
            self._problem(f"20: the box of {command.episode.id} goes before its label is durable")

    def over(self, episode: EpisodeKey) -> None:
        """The attempt's end is decided: what it still asks for is given up."""
        self._judged.add(episode.id)
        flying = self._flying.pop(episode.id, None)
        if flying is not None:
            self._given_up.add(flying[0])

    def sent(self, command: e.Generate, context: tuple[int, ...], now: float) -> None:
        """A request goes out with this context."""
        episode, replica = command.episode.id, command.replica
        request = (episode, command.turn, command.retry)
        flying = self._flying.get(episode)
        if flying is not None and flying[0] != request:
            self._problem(f"15: {request} goes to {replica} while {flying[0]} is at {flying[1]}")
        if self._rules.probes:
            self._may(request, replica, now)
        if self._rules.admission == "kv_fit":
            self._fits(request, replica, len(context), now)
        marks = blocks(context, self._size)
        known = self._sent[replica]
        here = next((n for n, mark in enumerate(marks) if mark not in known), len(marks))
        left = self._left.get(episode, {}).get(replica, 0)
        if command.cached > max((here + 1) * self._size, left):
            self._problem(
                f"19: {request}: {command.cached} tokens thought to be cached at {replica}, "
                f"which was sent {here * self._size} of them"
            )
        known.update(marks)
        self._asked[request] = replica
        self._flying[episode], self._sent_at[episode] = (request, replica, len(context)), now

    def _may(self, request: Request, replica: str, now: float) -> None:
        told, at = self._told.get(replica, (None, 0.0))
        if told is None or (replica, told.life) not in self._proven:
            self._problem(f"16: {request} goes to {replica}, which has passed no probe")
        elif now > at + told.ttl_s:
            self._problem(f"16: {request} goes to {replica}, whose credit has ended")
        old_s = self._old_s(replica)
        if old_s > self._patience_s:
            self._problem(f"17: {request} goes to {replica}, old for {old_s:.1f} s")

    def _old_s(self, replica: str) -> float:
        """For how long it had been behind by its newest word; without news its credit ends."""
        since = self._behind.get(replica)
        return self._told[replica][1] - since if since is not None else 0.0

    def _fits(self, request: Request, replica: str, tokens: int, now: float) -> None:
        """Those that outrank it, and it: within the credit, or it is the first in rank."""
        if now - self._quiet.get(request[0], now) >= self._rules.fair_hold_s - 1.0:
            self._first.add(request[0])  # held for so long that it goes first, until its reply
        if request[0] in self._first:
            return
        larger = [
            size
            for _, where, size in self._flying.values()
            if where == replica and size > tokens + _ESTIMATE_TOKENS
        ]
        told = self._told.get(replica)
        credit = told[0].credit_tokens if told is not None else 0
        slack = _ESTIMATE_TOKENS * (len(larger) + 1)
        if larger and sum(larger) + tokens > credit + slack:
            self._problem(
                f"18: {request} has {tokens} tokens; larger ones of {sum(larger)} run on "
                f"{replica}, which granted {credit}"
            )

    def replied(self, request: Request, context: tuple[int, ...], version: int) -> None:
        """A reply was taken into the conversation, which is `context` now. Under new weights that
        came meanwhile, `version`, all of it was computed again."""
        self._newer(self._asked[request], version)
        self._sent[self._asked[request]].update(blocks(context, self._size))

    def recorded(self, episode: EpisodeKey, turn: int, segments: Sequence[Segment]) -> None:
        """These segments are about to be made durable for a turn."""
        for segment in segments:
            if segment.kind is not SegmentKind.MODEL:
                continue
            by = [
                request
                for request in self._requests(episode.id, turn)
                if segment in self._engines.by_request[request]
            ]
            if by and all(request in self._given_up for request in by):
                self._problem(f"14: tokens of {by[0]} are recorded, and it was given up")

    def _requests(self, episode: str, turn: int) -> list[Request]:
        found: list[Request] = []
        while (episode, turn, len(found)) in self._engines.by_request or len(found) < 8:
            found.append((episode, turn, len(found)))
        return [request for request in found if request in self._engines.by_request]
