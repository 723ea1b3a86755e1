"""What must hold after every event of a simulated run, seen from outside the machines.

Owns: the invariants of the performance world. Promise: each looks at events, commands and the
models only, never at a machine's own books. Does not cover: faults of messages and stores (the
fault world has its own checks, sim/checks.py).
"""

from __future__ import annotations

from typing import Any

from services.readybank.events import Batch
from services.router import events as e
from services.router.rules import RouterRules
from sim.rollout.engine import EngineModel
from sim.rollout.talk import Talk


class Violated(AssertionError):
    """An invariant does not hold; the text says which, where, when."""


class Checks:
    """Feed `before` with each event and its commands before they are carried out, `batch` with each
    batch. `done`: how many single checks were made."""

    def __init__(
        self,
        rules: RouterRules,
        group_size: int,
        models: dict[str, EngineModel],
        talks: dict[str, Talk],
    ):
        self._rules, self._group_size = rules, group_size
        self._models, self._talks = models, talks
        # Under another placement a held conversation may be moved unseen from here.
        self._fits = (rules.admission, rules.rank, rules.placement) == (
            "kv_fit",
            "largest_context",
            "predicted_finish",
        )
        self._live: dict[tuple[str, int], str] = {}  # (group, sibling) → its one attempt
        self._boxes: set[tuple[str, str]] = set()  # (host, box) granted and not given back
        self._sent: dict[str, str] = {}  # episode → replica that samples for it
        self._homes: dict[str, dict[str, None]] = {name: {} for name in models}
        self._home: dict[str, str] = {}
        self._turn: dict[str, int] = {}  # episode → turn that may be asked for
        self._acting: set[str] = set()  # a step or a verifier runs
        self._ready: dict[str, float] = {}  # wants to go on since then
        self._batched: set[str] = set()
        self._fates: set[str] = set()
        self.done = 0

    def before(self, event: e.RouterEvent, commands: list[e.RouterCommand], now: float) -> None:
        """One event of the router, and what it answered."""
        heard = _HEARD.get(type(event))
        if heard is not None:
            heard(self, event, now)
        for command in commands:
            check = _CHECKS.get(type(command))
            if check is not None:
                check(self, command, now)
        for name, model in self._models.items():
            if model.cache.used > model.cache.total:
                raise Violated(f"{name} holds {model.cache.used} of {model.cache.total} blocks")
        self.done += 1 + len(commands)

    def batch(self, batch: Batch) -> None:
        """A batch is trained: whole groups, none twice."""
        for member in batch.members:
            if member.group in self._batched:
                raise Violated(f"group {member.group} is in a second batch, {batch.step}")
            if len(member.attempts) != self._group_size:
                raise Violated(f"{len(member.attempts)} siblings of {member.group} in a batch")
            self._batched.add(member.group)

    # What is heard

    def _granted(self, event: e.BoxAcquired, now: float) -> None:
        self._boxes.add((event.host, event.box))
        most = self._rules.episodes_max
        if len(self._boxes) > most:
            raise Violated(f"{len(self._boxes)} boxes are in use, {most} may be")
        self._waits(event.episode.id, now)

    def _waits(self, episode: str, now: float) -> None:
        self._ready[episode] = now

    def _replied(self, event: e.Generated | e.ContextFull, now: float) -> None:
        self._sent.pop(event.episode.id, None)

    def _acted(self, event: Any, now: float) -> None:
        self._acting.discard(event.episode.id)

    def _turned(self, event: e.TurnRecorded, now: float) -> None:
        self._turn[event.episode.id] = event.turn + 1
        self._waits(event.episode.id, now)

    def _ended(self, event: e.EpisodeRecorded, now: float) -> None:
        key = event.episode
        if self._live.pop((key.group, key.sibling), None) != key.id:
            raise Violated(f"{key.id} ended and was not the sibling's attempt")
        self._forget(key.id)

    def _fate(self, event: e.FateRecorded, now: float) -> None:
        if event.group in self._fates:
            raise Violated(f"group {event.group} has a second fate")
        self._fates.add(event.group)

    def _ticked(self, event: e.Tick, now: float) -> None:
        """Nobody that wants to go on is passed over for ever."""
        most = 2 * self._rules.fair_hold_s
        for episode, since in self._ready.items():
            if now - since > most:
                raise Violated(f"{episode} waits to go on since {now - since:.0f} s")

    # What is commanded

    def _acquire(self, command: e.AcquireBox, now: float) -> None:
        key = command.episode
        if self._live.setdefault((key.group, key.sibling), key.id) != key.id:
            raise Violated(f"{key.id} begins beside {self._live[key.group, key.sibling]}")

    def _generate(self, command: e.Generate, now: float) -> None:
        episode = command.episode.id
        if episode in self._sent:
            raise Violated(f"{episode} is sampled by {self._sent[episode]} already")
        if episode in self._acting:
            raise Violated(f"{episode} samples while its step runs")
        if command.turn != self._turn.get(episode, 0):
            raise Violated(f"{episode} asks for turn {command.turn}")
        waited = now - self._ready.pop(episode, now)
        self._sent[episode] = command.replica
        former = self._home.get(episode)
        if former != command.replica:
            if former is not None:
                self._homes[former].pop(episode, None)
            self._home[episode] = command.replica
            self._homes[command.replica][episode] = None
        if self._fits and waited < self._rules.fair_hold_s:
            self._credit(episode, command.replica)

    def _credit(self, episode: str, replica: str) -> None:
        """KV-Fit: with those that outrank it, it fits; the first in rank always does."""
        talks = self._talks
        mine = talks[episode].chain.tokens
        above = 0
        for other in self._homes[replica]:
            talk = talks.get(other)
            if talk is not None and talk.chain.tokens > mine:
                above += talk.chain.tokens
        most = self._rules.hold_fill * self._models[replica].kv_tokens
        if above and above + mine > most:
            raise Violated(f"{episode}: {above} + {mine} tokens on {replica}, {most:.0f} fit")

    def _abort(self, command: e.AbortGenerate, now: float) -> None:
        self._sent.pop(command.episode.id, None)

    def _exec(self, command: e.Exec, now: float) -> None:
        episode = command.episode.id
        if episode in self._sent or episode in self._acting:
            raise Violated(f"{episode} acts while it samples or acts")
        if (command.host, command.box) not in self._boxes:
            raise Violated(f"{episode} acts in {command.box}, which is not in use")
        self._acting.add(episode)

    def _verify(self, command: e.Verify, now: float) -> None:
        self._leaves(command.episode.id)
        self._acting.add(command.episode.id)

    def _finish(self, command: e.RecordEpisode, now: float) -> None:
        self._leaves(command.episode.id)

    def _release(self, command: e.ReleaseBox, now: float) -> None:
        self._boxes.discard((command.host, command.box))

    def _leaves(self, episode: str) -> None:
        home = self._home.pop(episode, None)
        if home is not None:
            self._homes[home].pop(episode, None)

    def _forget(self, episode: str) -> None:
        self._leaves(episode)
        self._turn.pop(episode, None)
        self._ready.pop(episode, None)
        self._acting.discard(episode)


_HEARD: dict[type[Any], Any] = {
    e.BoxAcquired: Checks._granted,
    e.Generated: Checks._replied,
    e.ContextFull: Checks._replied,
    e.StepFinished: Checks._acted,
    e.StepFailed: Checks._acted,
    e.VerdictGiven: Checks._acted,
    e.VerifyFailed: Checks._acted,
    e.TurnRecorded: Checks._turned,
    e.EpisodeRecorded: Checks._ended,
    e.FateRecorded: Checks._fate,
    e.Tick: Checks._ticked,
}
_CHECKS: dict[type[Any], Any] = {
    e.AcquireBox: Checks._acquire,
    e.Generate: Checks._generate,
    e.AbortGenerate: Checks._abort,
    e.Exec: Checks._exec,
    e.Verify: Checks._verify,
    e.RecordEpisode: Checks._finish,
    e.ReleaseBox: Checks._release,
}
