"""A sandbox host: the real pool and the real ledgers over dumb boxes.

Owns: the shell around both, as services/sandbox/driver.py has it. Promise: boxes exist when the
pool says so; steps run when the ledger says so; a call that comes again meets the same box, step
or verdict; a service that was killed finds its boxes again, with their answers and running steps,
or they died with it. Does not cover: decisions (services/sandbox/pool.py, ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.errors import Fenced, MusterError, NotFound, Refused, Unavailable
from muster.types import EpisodeKey, VerdictStatus
from services.sandbox import checks
from services.sandbox import events as p
from services.sandbox.box import Evidence, KeptStep
from services.sandbox.ledger import Decision, Ledger
from services.sandbox.pool import Pool, PoolRules
from services.sandbox.verdict import Verdict
from sim.box import DumbBox
from sim.led import Shared
from sim.models import Model
from sim.net import Respond
from sim.process import Process

IDLE_S, ADOPT_S, ORPHAN_S = 90.0, 30.0, 30.0
ANSWERS_KEPT = 16
Caller = tuple[EpisodeKey, Respond]


class Ask:
    """Callers that wait for one attempt's box, and the box."""

    def __init__(self, key: EpisodeKey):
        self.key = key
        self.callers: list[Caller] = []
        self.name = ""
        self.answer: Any = None
        self.touched = False


class Held:
    """What the host keeps of one box."""

    def __init__(self, ask: Ask, dumb: DumbBox):
        self.ask, self.dumb, self.ledger = ask, dumb, Ledger()
        self.stepping: list[Caller] = []
        self.verifying: list[Caller] = []
        self.running = self.judging = False
        self.answers: list[KeptStep] = []  # what PID 1 keeps
        self.under_way: tuple[int, str, float, Evidence] | None = None  # … and runs, till when
        self.untold: Verdict | None = None
        self.ending: list[Respond] = []


class Host(Process):
    """One host. `boxes_ever` and `verdicts` are for the checks."""

    def __init__(self, shared: Shared, name: str, model: Model):
        super().__init__(shared.world, name, "sandbox")
        self.shared, self.model = shared, model
        self.boxes_ever: list[DumbBox] = []
        self.verdicts: dict[str, set[float]] = {}
        self.dead: set[str] = set()
        self._left: dict[str, Held] = {}  # by the former service
        self._left_at = 0.0
        self.boxes: dict[str, Held] = {}
        self.fenced_calls = 0
        self._heard_of = 0  # the newest owner that spoke to this service
        self.count = 0  # boxes that exist or start
        self.on_run: Callable[[DumbBox, int], None] = lambda box, turn: None
        # box → whose turn a router wants a step of there, and whether that router still does
        self.wanted: dict[str, tuple[str, int, Callable[[], bool]]] = {}

    def boot(self) -> None:
        rules = PoolRules(boxes_max=self.model.boxes_max, idle_s=IDLE_S, adopt_s=ADOPT_S)
        self.pool = Pool(rules, prefix=f"{self.name}.{self.life}")
        self.boxes, self._heard_of = {}, 0
        self._asks: dict[int, Ask] = {}
        self._attempts: dict[EpisodeKey, Ask] = {}
        self._tickets = 0
        left, self._left = self._left, {}
        for name, former in left.items():
            if self.world.now - self._left_at < ORPHAN_S:
                self._adopt(name, former)
            else:
                self.shared.truth.box_died(former.dumb, self.name)
        self.shared.announce(self)
        self.every(0.5, lambda: self.feed(p.Ticked()))

    def died(self) -> None:
        survive = self.world.rng("boxes survive").random() < self.model.boxes_survive
        self._left_at, self.count = self.world.now, 0
        for name, held in self.boxes.items():
            if survive and not held.dumb.dead and not held.ending:
                self._left[name] = held
            else:
                self.shared.truth.box_died(held.dumb, self.name)
        for name, (episode, turn, still) in self.wanted.items():
            # The command may not have come so far, or met no box, but nobody can tell by now.
            if name not in self._left and still():
                self.shared.truth.struck(episode, turn, self.name)
        self.boxes = {}

    def _adopt(self, name: str, former: Held) -> None:
        ask = Ask(former.ask.key)
        ask.name = ask.answer = name
        held = self.boxes[name] = Held(ask, former.dumb)
        self._attempts[p.identity(ask.key)] = ask
        under_way = held.under_way = former.under_way
        held.answers = former.answers[-ANSWERS_KEPT:]
        running = under_way[:2] if under_way else None
        held.ledger.restore(held.answers, running, former.ledger.newest)
        held.ledger.closed = former.ledger.closed
        ask.touched = held.ledger.newest >= 0 or bool(held.ledger.closed)
        self.feed(p.Adopted(name, ask.key))
        if under_way is not None:
            held.running = True
            self.soon(under_way[2] - self.world.now, lambda: self._stepped(held, under_way[3]))

    # calls

    def acquire(self, key: EpisodeKey, fresh: bool, respond: Respond) -> None:
        if self._fenced(key.run, key.owner_epoch, p.Spoke(key), respond):
            return
        ask = self._attempts.get(p.identity(key))
        if ask is not None and ask.answer is not None:
            gone = self.pool.refusal(key, ask.name) is not None
            if not gone and ask.touched and not fresh:
                respond(Refused("this attempt has a box that ran steps", field="episode"))
                return
            if gone or ask.touched:
                held = self.boxes.get(ask.name)
                if held is not None:
                    held.ending.append(lambda _: self.acquire(key, fresh, respond))
                    self.feed(p.Released(ask.name))
                    return
                ask = None
        if ask is None:
            ask = self._attempts[p.identity(key)] = Ask(key)
            self._tickets += 1
            self._asks[self._tickets] = ask
            ask.callers.append((key, respond))
            self.feed(p.Asked(self._tickets, key, self.world.now + 30.0))
            return
        self.feed(p.Spoke(key, ask.name))
        if ask.answer is not None:
            respond(ask.answer)
        else:
            ask.callers.append((key, respond))

    def execute(
        self,
        key: EpisodeKey,
        box: str,
        turn: int,
        command: str,
        seconds: float,
        after: int,
        respond: Respond,
    ) -> None:
        found = self._find(key, box)
        if isinstance(found, MusterError):
            respond(found)
            return
        try:
            decision = found.ledger.decide(turn, command, after, box)
        except MusterError as error:
            respond(error)
            return
        if decision is Decision.REPEAT:
            respond((found.ledger.kept(turn), True))
            return
        found.stepping.append((key, respond))
        if decision is Decision.RUN:
            found.ledger.begin(turn, command)
            found.running = True
            if found.dumb.dead:
                # Nobody can tell by now that it was dead before.
                self.shared.truth.struck(found.dumb.episode, turn, self.name)
                self.soon(0.01, lambda: self._stepped(found, None))
                return
            code, text = found.dumb.run(turn, command, self.wall())
            self.on_run(found.dumb, turn)
            self.shared.truth.acted[found.dumb.episode] += seconds
            evidence = Evidence(exit_code=code, wall_s=seconds, cpu_s=seconds, head=text)
            found.under_way = (turn, command, self.world.now + seconds, evidence)
            self.soon(seconds, lambda: self._stepped(found, evidence))

    def _stepped(self, found: Held, evidence: Evidence | None) -> None:
        if not found.running:
            return
        waiting, found.stepping, found.running = found.stepping, [], False
        ran, found.under_way = found.under_way, None
        result: Any
        if evidence is None or found.dumb.dead:
            found.ledger.lose("the result of a step was lost")
            result = _lost("the box is lost with the result of its step")
            self.feed(p.Released(found.dumb.name))
        else:
            result = (found.ledger.finish(evidence), False)
            if ran is not None:
                found.answers.append(KeptStep(ran[0], ran[1], evidence))
        for _, respond in waiting:
            respond(result)

    def verify(self, key: EpisodeKey, box: str, after: int, respond: Respond) -> None:
        found = self._find(key, box)
        if isinstance(found, MusterError):
            respond(found)
            return
        try:
            found.ledger.check(after, box)
        except MusterError as error:
            respond(error)
            return
        if found.running:
            respond(Refused("a step of this box is running", field="box", value=box))
            return
        try:
            found.ledger.check(after, box)
        except MusterError as error:
            respond(error)
            return
        if found.untold is not None:
            told, found.untold = found.untold, None
            respond(told)
            return
        found.ledger.closed = "its files are sealed for verification"
        found.verifying.append((key, respond))
        if not found.judging:
            found.judging = True
            wait = self.world.spread("verify", self.model.verify_s)
            self.soon(wait, lambda: self._judged(found))

    def _judged(self, found: Held) -> None:
        waiting, found.verifying, found.judging = found.verifying, [], False
        result: Any = Unavailable("the host could not judge", field="verifier")
        if not found.dumb.dead:
            reward = found.dumb.reward(self.model.solved)
            self.verdicts.setdefault(found.dumb.episode, set()).add(reward)
            result = Verdict(VerdictStatus.REWARDED, reward, "")
            if not waiting:
                found.untold = result
        for _, respond in waiting:
            respond(result)

    def release(self, key: EpisodeKey, box: str, respond: Respond) -> None:
        found = self._find(key, box)
        if isinstance(found, MusterError):
            respond(False if found.code == "NOT_FOUND" else found)
            return
        found.ending.append(respond)
        self.feed(p.Released(box))

    def claim(self, run: str, epoch: int, respond: Respond) -> None:
        """A router makes its epoch known."""
        if not self._fenced(run, epoch, p.Claimed(run, epoch), respond):
            respond(self.pool.living(run))

    def _fenced(self, run: str, epoch: int, event: p.Event, respond: Respond) -> bool:
        self.feed(event)
        fence = self.pool.fence(run, epoch)
        if fence is None:
            self._obeys(epoch)
            return False
        self.fenced_calls += 1
        respond(fence)
        return True

    def _obeys(self, epoch: int) -> None:
        """A call of this owner is served."""
        if epoch < self._heard_of:
            self.shared.problem(f"8: {self.name} obeys the former owner {epoch}")
        self._heard_of = max(self._heard_of, epoch)

    def _find(self, key: EpisodeKey, box: str) -> Held | MusterError:
        self.feed(p.Spoke(key, box))
        refusal = self.pool.refusal(key, box)
        if refusal is not None:
            self.fenced_calls += isinstance(refusal, Fenced)
            return refusal
        self._obeys(key.owner_epoch)
        found = self.boxes[box]
        found.ask.touched, found.ask.key = True, key  # as its note has it
        return found

    # the pool

    def feed(self, event: p.Event) -> None:
        commands = self.pool.handle(event, self.world.now)
        self.count = len(self.pool.boxes)
        self.world.record(self.name, event, commands)
        for command in commands:
            match command:
                case p.StartBox(ticket, box, _):
                    ask = self._asks.pop(ticket)
                    ask.name = box
                    wait = self.world.spread("box", self.model.box_s)
                    self.soon(wait, self._starter(ask, box))
                case p.RefuseTicket(ticket):
                    ask = self._asks.pop(ticket)
                    self._forget(ask)
                    self._settle(ask, checks.refused(command))
                case p.EndBox(box, _):
                    self.soon(0.02, self._ender(box))
                case p.TellFormer():
                    self._tell_former()

    def _starter(self, ask: Ask, box: str) -> Callable[[], None]:
        def started() -> None:
            dumb = DumbBox(box, ask.key.id)
            self.boxes_ever.append(dumb)
            self.boxes[box] = Held(ask, dumb)
            ask.answer = box
            self.feed(p.Started(box))
            self._settle(ask, box)

        return started

    def _ender(self, box: str) -> Callable[[], None]:
        def ended() -> None:
            held = self.boxes.pop(box, None)
            self.feed(p.Ended(box))
            if held is None:
                return
            self._forget(held.ask)
            gone = _lost("the box was ended meanwhile", box)
            for _, respond in (*held.stepping, *held.verifying):
                respond(gone)
            held.stepping, held.verifying = [], []
            for done in held.ending:
                done(True)

        return ended

    def _tell_former(self) -> None:
        """Callers whose epoch was replaced while they wait are told; what they began goes on."""
        rows = [ask.callers for ask in self._attempts.values()]
        rows += [row for held in self.boxes.values() for row in (held.stepping, held.verifying)]
        for row in rows:
            for caller in list(row):
                fence = self.pool.fence(caller[0].run, caller[0].owner_epoch)
                if fence is not None:
                    row.remove(caller)
                    self.fenced_calls += 1
                    caller[1](fence)

    def _forget(self, ask: Ask) -> None:
        if self._attempts.get(p.identity(ask.key)) is ask:
            del self._attempts[p.identity(ask.key)]

    @staticmethod
    def _settle(ask: Ask, answer: Any) -> None:
        callers, ask.callers = ask.callers, []
        for _, respond in callers:
            respond(answer)

    # faults

    def lose(self, chance: float) -> str:
        """One box dies, with what it was doing; its name, "" when there is none."""
        names = sorted(name for name, held in self.boxes.items() if not held.dumb.dead)
        if not names:
            return ""
        name = names[int(chance * len(names))]
        held = self.boxes[name]
        held.dumb.dead = True
        self.shared.truth.box_died(held.dumb, self.name)
        if held.running:
            self._stepped(held, None)
        return name


def _lost(problem: str, box: str = "") -> NotFound:
    """`box`: named when it was not the step that it went with."""
    return NotFound(problem, field="box", value=box, way_out="acquire a new box")
