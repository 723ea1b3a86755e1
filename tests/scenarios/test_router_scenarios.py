"""Stories of the router as text: router_*.txt holds blocks of `input ---- output`.

What is written to the streams, boxes and verifiers succeeds at once and is not told; the model's
replies, the commands in boxes and the probes are the story's. Verbs (name=value may be left out):
  rules NAME=VALUE...              a fresh machine; probes and kv_fit unless said otherwise
  submit JOB GROUPS SIZE           [prompt=] tokens that siblings share
  takeover JOB GROUPS SIZE         [prompt=] a new router, the groups opened by a former one
  replicas NAME... | hosts NAME...
  told REPLICA CREDIT              [life= version= block= steps= running= serving=no ttl=]
  silent REPLICA
  probed REPLICA                   [passed=no life=]
  reply EPISODE TOKENS             [say=done retry= cached= version=] retry: of a late one
  failed EPISODE                   [full=yes retry=]
  step EPISODE TOKENS              its command ended; tokens of what it printed
  boxlost EPISODE                  its box is gone with the result of its command
  version N                        [step=]
  fate GROUP FATE STEP
  cancel JOB
  tick SECONDS                     in quarters of a second, as the service ticks
  show                             who is where
  explain EPISODE
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from muster.types import EpisodeKey, Fate, FinishReason, SamplingParams, StepLimit, VerdictStatus
from services.router import events as e
from services.router.machine import RouterMachine
from services.router.rules import RouterRules
from tests.scenarios import playing
from tests.scenarios.playing import check

HERE = Path(__file__).parent
RUN = "story"
_COMMAND = "```bash\nwork\n```"
_DEFAULTS: dict[str, Any] = {
    "placement": "predicted_finish",
    "admission": "kv_fit",
    "probes": True,
    "reserve_tokens": 100,
    "context_tokens_max": 100_000,
    "episode_tokens_max": 100_000,
    "turn_tokens_max": 100_000,
    "turns_max": 100,
    "lag_max": 4,
    "interleave_groups": 2,
    "keepalive_tokens": 0,
    "prefix_block_tokens": 16,
}


class Story(playing.Story):
    """Runs the lines of one file."""

    def __init__(self, **named: Any) -> None:
        self.now = 0.0
        self.machine = RouterMachine(RouterRules(RUN, 1, **{**_DEFAULTS, **named}))
        self.machine.handle(e.RecoveryEnded(), 0.0)
        self.asked: dict[str, e.Generate] = {}
        self.execs: dict[str, e.Exec] = {}
        self.lives: dict[str, str] = {}
        self.prompt = 0

    def feed(self, event: e.RouterEvent) -> list[str]:
        """The commands that are told, and what the others led to."""
        said: list[str] = []
        for command in self.machine.handle(event, self.now):
            told = self._tell(command)
            said += [told] if told else []
            answer = self._answer(command)
            if answer is not None:
                said += self.feed(answer)
        return said

    def _answer(self, command: e.RouterCommand) -> e.RouterEvent | None:
        """Of what succeeds at once."""
        match command:
            case e.OpenGroup():
                blocks = tuple(range(1, 1 + self.prompt // 16))
                return e.GroupRecorded(command.group, self.prompt, blocks)
            case e.AcquireBox():
                box = f"box-{command.episode.id}"
                return e.BoxAcquired(command.episode, command.host, box, self.now, self.now)
            case e.RecordIntent():
                return e.IntentRecorded(command.episode, command.turn)
            case e.RecordTurn():
                return e.TurnRecorded(command.episode, command.turn)
            case e.RecordRestored():
                return e.RestoredRecorded(command.episode, command.repair)
            case e.Verify():
                verdict = (VerdictStatus.REWARDED, 1.0, "")
                return e.VerdictGiven(command.episode, *verdict, self.now, self.now)
            case e.RecordEpisode():
                return e.EpisodeRecorded(command.episode)
            case e.Generate():
                self.asked[command.episode.id] = command
            case e.Exec():
                self.execs[command.episode.id] = command
        return None

    def _tell(self, command: e.RouterCommand) -> str:
        """What people want to see of it, "" for the rest."""
        match command:
            case e.AcquireBox():
                return f"acquire {command.episode.id} on {command.host}"
            case e.Generate():
                again = f" retry {command.retry}" if command.retry else ""
                cached = f", {command.cached} cached" if command.cached else ""
                at = f"{command.episode.id} turn {command.turn}{again} at {command.replica}"
                return f"generate {at} ({command.why}{cached})"
            case e.AbortGenerate():
                return f"abort {command.episode.id} turn {command.turn} at {command.replica}"
            case e.ProbeReplica():
                return f"probe {command.replica} life {command.life}"
            case e.RecordEpisode():
                return f"end {command.episode.id}: {command.label.outcome} {command.label.cause}"
            case e.Touch():
                return f"touch {command.episode.id} at {command.replica}"
        return ""

    def key(self, episode: str) -> EpisodeKey:
        group, sibling, attempt = episode.rsplit(".", 2)
        return EpisodeKey(RUN, group, int(sibling), int(attempt), 1)

    # verbs

    def do_rules(self, **named: str) -> list[str]:
        plain = RouterRules(RUN, 1)
        kinds = {f: type(getattr(plain, f)) for f in RouterRules.__struct_fields__}
        given = {k: v == "yes" if kinds[k] is bool else kinds[k](v) for k, v in named.items()}
        self.__init__(**given)  # type: ignore[misc]
        return []

    def do_submit(self, job: str, groups: str, size: str, prompt: str = "0") -> list[str]:
        self.prompt = int(prompt)
        return self._submit(job, groups, size)

    def _submit(self, job: str, groups: str, size: str) -> list[str]:
        task = e.TaskInfo("task", "digest", "Do it.")
        spec = e.JobSpec(job, (task,), int(groups), int(size), SamplingParams(), 0.0)
        return self.feed(e.JobSubmitted(spec))

    def do_takeover(self, job: str, groups: str, size: str, prompt: str = "0") -> list[str]:
        self.machine, self.prompt = RouterMachine(self.machine.rules), int(prompt)
        said = self._submit(job, groups, size)
        shared = (self.prompt, tuple(range(1, 1 + self.prompt // 16)))
        siblings = (e.SiblingRestored(0, started=True),) * int(size)
        for n in range(int(groups)):
            said += self.feed(e.GroupRestored(f"{job}-{n:05d}", job, n, siblings, *shared))
        return said + self.feed(e.RecoveryEnded())

    def do_replicas(self, *names: str) -> list[str]:
        return self.feed(e.ReplicasListed(tuple(e.Replica(n, n) for n in names)))

    def do_hosts(self, *names: str) -> list[str]:
        return self.feed(e.HostsListed(tuple(e.Host(n, n) for n in names)))

    def do_told(
        self, replica: str, credit: str, serving: str = "yes", ttl: str = "1000", **more: str
    ) -> list[str]:
        life = self.lives[replica] = more.pop("life", self.lives.get(replica, "1"))
        block, version = int(more.pop("block", 16)), int(more.pop("version", 0))
        counts: dict[str, Any] = {name: int(value) for name, value in more.items()}
        at = (replica, life, version, serving == "yes", int(credit), float(ttl), block)
        return self.feed(e.ReplicaTold(*at, **counts))

    def do_silent(self, replica: str) -> list[str]:
        return self.feed(e.ReplicaSilent(replica, "it does not answer"))

    def do_probed(self, replica: str, passed: str = "yes", life: str = "") -> list[str]:
        of = life or self.lives.get(replica, "")
        return self.feed(e.ReplicaProbed(replica, of, passed == "yes", took_s=0.1))

    def do_reply(self, episode: str, tokens: str, say: str = "", **more: str) -> list[str]:
        asked = self.asked[episode]
        prompt = self._context(episode)
        event = e.Generated(
            episode=self.key(episode),
            turn=asked.turn,
            text="DONE" if say == "done" else _COMMAND,
            finish=FinishReason.STOP,
            prompt_tokens=prompt,
            sampled_tokens=int(tokens),
            start_unix_s=self.now,
            queue_s=0.0,
            prefill_s=0.0,
            end_unix_s=self.now,
            retry=int(more.get("retry", asked.retry)),
            cached_tokens=int(more.get("cached", 0)),
            version=int(more.get("version", 0)),
        )
        return self.feed(event)

    def _context(self, episode: str) -> int:
        """Tokens of its newest request's prompt."""
        attempt = self.machine._episodes.get(episode)
        return attempt._request().context_tokens if attempt is not None else self.prompt

    def do_failed(self, episode: str, full: str = "", retry: str = "") -> list[str]:
        asked = self.asked[episode]
        at = (self.key(episode), asked.turn, asked.replica, "it failed")
        number = int(retry) if retry else asked.retry
        return self.feed(e.GenerateFailed(*at, full == "yes", number))

    def do_step(self, episode: str, tokens: str) -> list[str]:
        run = self.execs[episode]
        event = e.StepFinished(
            *(run.episode, run.turn, 0, StepLimit.NONE, 0.1, 0.1, "out", False),
            *(self.now, self.now),
            box=run.box,
            output_tokens=int(tokens),
        )
        return self.feed(event)

    def do_boxlost(self, episode: str) -> list[str]:
        run = self.execs[episode]
        lost = e.StepFailed(run.episode, run.turn, "its box is gone", e.Loss.BOX_GONE, run.box)
        return self.feed(lost)

    def do_version(self, number: str, step: str = "") -> list[str]:
        return self.feed(e.VersionPublished(int(number), int(step or number)))

    def do_fate(self, group: str, fate: str, step: str = "0") -> list[str]:
        return self.feed(e.FateRecorded(group, Fate(fate), int(step)))

    def do_cancel(self, job: str) -> list[str]:
        return self.feed(e.JobCancelled(job))

    def do_tick(self, seconds: str) -> list[str]:
        said: list[str] = []
        until = self.now + float(seconds)
        while self.now < until:
            self.now = min(self.now + 0.25, until)
            said += self.feed(e.Tick())
        return said

    def do_show(self) -> list[str]:
        return [
            f"{id_}: {found.phase} at {found.replica or 'no replica'}"
            for id_, found in sorted(self.machine._episodes.items())
        ]

    def do_explain(self, subject: str) -> list[str]:
        lines = self.machine.explain(subject, self.now, self.now, "logs")
        return [f"{w.subject}: {w.state}; waits for {w.waits_for or 'nothing'}" for w in lines[-1:]]


@pytest.mark.parametrize("path", sorted(HERE.glob("router_*.txt")), ids=lambda p: p.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    check(Story(), path, request)
