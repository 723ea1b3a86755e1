"""The router on a fleet whose replicas come, go, fail, lie still and restart, after a takeover too.

What is checked after every step: the kept counts are those of the requests and homes there are;
who is held by the seats is held in its episode, without a time to wake it, and nobody else is; a
request runs where its seat is. At the end replicas are well again, or all but one, which never is:
then everything that was held goes on and ends.
"""

from __future__ import annotations

import os
import random
from zlib import crc32

import pytest

from services.router import events as e
from services.router.episode import Phase
from services.router.programs import State
from tests.unit.router.granted import BLOCK, told
from tests.unit.router.test_resume import turn
from tests.unit.router.world import World, default, failed, generated, job, stepped

SEEDS = int(os.environ.get("MUSTER_TEST_EXAMPLES", "90")) // 4
STEPS = 250
REPLICAS = ("r0", "r1", "r2")
HOSTS = e.HostsListed((e.Host("h0", "h0:1"), e.Host("h1", "h1:1")))
KV, TTL_S, WEDGE_S = 60_000, 10.0, 20.0
_ANSWERED = (
    e.AcquireBox,
    e.Generate,
    e.Exec,
    e.Verify,
    e.ProbeReplica,
    e.RecordTurn,
    e.RecordIntent,
    e.RecordEpisode,
    e.OpenGroup,
)


def listed(replicas: tuple[str, ...]) -> e.ReplicasListed:
    return e.ReplicasListed(tuple(e.Replica(r, f"{r}:1") for r in replicas))


class Weather:
    """One random history. `broken`: a replica that answers what it is asked, and never samples."""

    def __init__(self, seed: int, broken: str):
        self.chance = chance = random.Random(seed)
        self.broken, self.never = broken, chance.random() < 0.5  # never: from the first probe on
        self.world = World(
            admission=chance.choice(["kv_fit", "kv_fit", "hold_resume", "pressure", "none"]),
            placement=chance.choice(
                ["predicted_finish", "predicted_finish", "sticky_least_loaded"]
            ),
            probes=True,
            reserve_tokens=3000,
            prefix_block_tokens=16,
            turns_max=8,
            context_tokens_max=10**6,
            episode_tokens_max=10**6,
            keepalive_tokens=2000,
            fair_hold_s=chance.choice([30.0, 1e9]),
            migrate_prefill_s=chance.choice([0.1, 6.0]),
            hold_max_s=1e6,
            episodes_max=12,
            lag_max=1,
            infra_ceiling=1.0,
            wedge_s=WEDGE_S,
        )
        self.waiting: list = []  # commands that are not answered yet
        for kind in _ANSWERED:
            self.world.on(kind, self.waiting.append)  # type: ignore[arg-type]
        self.life = dict.fromkeys(REPLICAS, 0)
        self.serves = dict.fromkeys(REPLICAS, 0)
        self.steps = dict.fromkeys(REPLICAS, 0)
        self.up = set(REPLICAS)
        self.version = 0
        self.size: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """With conversations of a former router, or without; replicas known before them, or not."""
        if self.chance.random() < 0.6:
            self.world.feed(job("t", size=4, max_turns=8))
            siblings = tuple(self.left_over(number) for number in range(4))
            self.world.feed(e.GroupRestored("t-00000", "t", 0, siblings))
        self.world.feed(listed(REPLICAS), HOSTS)
        if self.chance.random() < 0.5:
            self.tell()
        self.world.feed(e.RecoveryEnded(), job("j", groups=3, size=4, max_turns=8))

    def left_over(self, number: int) -> e.SiblingRestored:
        tokens, replica = self.chance.choice([500, 9000, 40_000]), self.chance.choice(REPLICAS)
        former = (turn(0, prompt_tokens=tokens, replica=replica),)
        return e.SiblingRestored(0, resume=e.Resume(former, host="h0", box=f"b{number}"))

    # -- what happens --------------------------------------------------------------------

    def tell(self, replicas: tuple[str, ...] = REPLICAS, **fields: object) -> None:
        for replica in replicas:
            given: dict = {
                "life": f"l{self.life[replica]}",
                "version": self.serves[replica],
                "credit_tokens": KV,
                "ttl_s": TTL_S,
                "running": sum(
                    isinstance(c, e.Generate) and c.replica == replica for c in self.waiting
                ),
                "steps": self.steps[replica],
            } | fields
            self.world.feed(told(replica, **given))

    def answer(self, command: e.RouterCommand, *, well: bool) -> None:
        self.waiting.remove(command)
        x = 1.0 if well else self.chance.random()
        match command:
            case e.Generate():
                if command.replica not in self.up or x < 0.08:
                    self.world.feed(failed(command, full=x < 0.03))
                else:
                    self.reply(command)
            case e.ProbeReplica(replica=replica, life=life):
                passed = replica in self.up and x > 0.2 and not self.refuses(replica, well=well)
                full = not passed and self.chance.random() < 0.3
                self.world.feed(e.ReplicaProbed(replica, life, passed, "no", full=full))
            case e.Exec():
                if x < 0.05:
                    lost = (command.turn, "gone", e.Loss.BOX_GONE, command.box)
                    self.world.feed(e.StepFailed(command.episode, *lost))
                else:
                    tokens = self.chance.choice([10, 2000])
                    self.world.feed(stepped(command, box=command.box, output_tokens=tokens))
            case e.AcquireBox() if x < 0.1:
                self.world.feed(e.BoxRefused(command.episode, command.host, "full", True))
            case _:
                event = default(command)
                assert event is not None
                self.world.feed(event)

    def refuses(self, replica: str, *, well: bool) -> bool:
        return replica == self.broken and (well or self.never)

    def reply(self, command: e.Generate) -> None:
        begun = self.size.get(command.episode.id) or self.chance.choice([300, 2000, 15_000])
        tokens = self.size[command.episode.id] = begun + self.chance.choice([50, 3000, 8000])
        self.steps[command.replica] += 1
        self.world.feed(
            generated(
                command,
                "DONE" if self.chance.random() < 0.15 else BLOCK,
                prompt_tokens=tokens - 5,
                cached_tokens=self.chance.choice([0, tokens - 5]),
                version=self.serves[command.replica],
                boundary=crc32(f"{command.episode.id} {command.turn}".encode()),
                boundary_tokens=tokens // 16 * 16,
            )
        )

    def time_passes(self) -> None:
        self.world.now += self.chance.choice([0.25, 1.0, 3.0])
        for replica in REPLICAS:
            if replica not in self.up:
                self.world.feed(e.ReplicaSilent(replica, "no answer"))
            elif self.chance.random() < 0.9:
                self.tell((replica,))
        self.world.feed(e.Tick())

    def step(self) -> None:
        acts = {
            self.answers: 62,
            self.time_passes: 20,
            self.restarts: 3,
            self.turns_over: 4,
            self.is_listed: 2,
            self.is_published: 2,
            self.follows: 3,
            self.says: 2,
            lambda: self.world.feed(HOSTS): 2,
        }
        (act,) = self.chance.choices(list(acts), list(acts.values()))
        act()
        if self.chance.random() < 0.7:  # else a reply may still come
            self.forget_aborted()

    def answers(self) -> None:
        if self.waiting:
            self.answer(self.chance.choice(self.waiting), well=False)

    def restarts(self) -> None:
        self.life[self.chance.choice(REPLICAS)] += 1

    def turns_over(self) -> None:
        self.up ^= {self.chance.choice(REPLICAS)}

    def is_listed(self) -> None:
        self.world.feed(listed(tuple(r for r in REPLICAS if self.chance.random() < 0.7)))

    def is_published(self) -> None:
        self.version += 1
        self.world.feed(e.VersionPublished(self.version, self.version))

    def follows(self) -> None:
        self.serves[self.chance.choice(REPLICAS)] = self.version

    def says(self) -> None:
        fields = [{"serving": False, "credit_tokens": 0}, {"credit_tokens": 0}, {"updating": True}]
        self.tell((self.chance.choice(REPLICAS),), **self.chance.choice(fields))

    def forget_aborted(self) -> None:
        gone = {
            (c.episode, c.turn, c.retry)
            for c in self.world.log[-60:]
            if isinstance(c, e.AbortGenerate)
        }
        self.waiting[:] = [
            c
            for c in self.waiting
            if not (isinstance(c, e.Generate) and (c.episode, c.turn, c.retry) in gone)
        ]

    # -- what must hold ------------------------------------------------------------------

    def check(self) -> None:
        episodes, fleet = self.world.machine._episodes, self.world.machine._fleet
        loads = fleet.loads
        asked = {id_: a.replica for id_, a in loads.asked.items()}
        running = {i: x.replica for i, x in episodes.items() if x.phase is Phase.GENERATE}
        assert asked == running
        for replica, load in loads.loads.items():
            homes = [home for home in loads.homes.values() if home.replica == replica]
            assert load.in_flight == sum(at == replica for at in asked.values())
            assert load.sessions == len(homes)
            assert load.load_tokens == sum(home.context for home in homes)
        if fleet.seats is None:
            return
        programs = {program.id: program for program in fleet.seats.programs()}
        held = {id_ for id_, program in programs.items() if program.state is State.HELD}
        asleep = {i for i, x in episodes.items() if x.phase is Phase.HOLD and x._wake_at is None}
        assert held == asleep == {i for i in held if episodes[i].held_for_kv}
        for id_, replica in running.items():
            assert programs[id_].home == replica
        for id_, episode in episodes.items():
            assert (episode.phase in (Phase.VERIFY, Phase.FINISH)) <= (id_ not in programs)

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
            self.check()
        self.up, self.serves = set(REPLICAS), dict.fromkeys(REPLICAS, self.version)
        self.world.feed(listed(REPLICAS))
        for count in range(4000):
            if not self.world.machine._episodes:
                return
            self.forget_aborted()
            ready = [c for c in self.waiting if not self.hangs(c)]
            if ready:
                self.answer(ready[0], well=True)
            if not ready or count % 20 == 0:
                self.second()
            self.check()
        left = {i: x.phase for i, x in self.world.machine._episodes.items()}
        raise AssertionError(f"never ended: {left}")

    def hangs(self, command: e.RouterCommand) -> bool:
        return isinstance(command, e.Generate) and command.replica == self.broken

    def second(self) -> None:
        self.world.now += 1.0
        for replica in REPLICAS:
            self.steps[replica] += replica != self.broken
        self.tell()
        self.world.feed(e.Tick())


@pytest.mark.parametrize("broken", ["", "r2"], ids=["all are well", "one never is"])
def test_whatever_befalls_replicas_everything_goes_on_and_ends(broken: str) -> None:
    for seed in range(SEEDS):
        try:
            Weather(seed, broken).run()
        except AssertionError as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem
