"""What every attempt has: a box, an end, a label.

Owns: getting a box (the first, or one for a lost one), verification, the label, the release.
Promise: pure; the box is kept until the label is durable, so that a router which takes over can
verify; a box is rebuilt at most `replays_max` times. Does not cover: the turns and what is
replayed (episode.py, sampling.py), the outcome rules (muster.outcome).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum

from muster.outcome import End, Evidence, Failure, Verdict, judge, needs_rerun
from muster.types import EpisodeKey, EpisodeState, OutcomeLabel, SamplingParams, Value
from services.router import events as e
from services.router.account import Account
from services.router.fleet import Fleet
from services.router.hosts import Picked
from services.router.rules import RouterRules

Commands = list[e.RouterCommand]


class Phase(StrEnum):
    """What the episode waits for."""

    BOX = "box"
    HOLD = "hold"  # a replica, or the time of a retry
    GENERATE = "generate"
    INTEND = "intend"
    STEP = "step"
    RECORD = "record"
    REPLAY = "replay"  # a new box for a lost one, its state, the record of it
    VERIFY = "verify"
    FINISH = "finish"
    OVER = "over"


class Given(Value, frozen=True):
    """What an attempt is made of. `fresh`: a former router may have left a box of it that no record
    names."""

    key: EpisodeKey
    task: e.TaskInfo
    sampling: SamplingParams
    rules: RouterRules
    replays_max: int
    fresh: bool = False


class Attempt(ABC):
    """Its box and its end. Every `on_*` takes an event of this attempt and answers commands."""

    def __init__(self, given: Given):
        self.key, self.task, self.rules = given.key, given.task, given.rules
        self.id = given.key.id
        self.phase = Phase.BOX
        self.turn = self.turns_recorded = 0
        self.host = self.box = self.replica = ""
        self.picked = Picked("")  # the newest choice of a host
        self.label: OutcomeLabel | None = None
        self.replays = 0  # boxes rebuilt, durably
        self.account = Account()
        self._fresh = given.fresh
        self._replays_max = given.replays_max
        self._lost_host = ""  # a new box had better be elsewhere
        self._rebuilds = 0  # begun
        self._killed: dict[int, set[str]] = {}  # turn → hosts that went while its command ran
        self._retry = self._retries = 0
        self._wake_at: float | None = None
        self._waits_since: float | None = None  # for a box
        self._verdicts: tuple[Verdict, ...] = ()
        self._end: End | None = None
        self._failure, self._detail = Failure.NONE, ""

    @abstractmethod
    def _has_box(self, event: e.BoxAcquired, fleet: Fleet, now: float) -> Commands:
        """A box is there: the first turn, or the replay of a lost box's steps."""

    @property
    @abstractmethod
    def _ran(self) -> int:
        """The newest recorded turn whose command ran, -1 before the first: it is in the box."""

    @abstractmethod
    def _lost_box(self, reason: str) -> None:
        """The box is gone and another will be asked for."""

    # -- box ---------------------------------------------------------------------------

    def start(self, fleet: Fleet, now: float) -> Commands:
        """Ask a host for a box; wait when there is none."""
        if self._waits_since is None:
            self._waits_since = now
        picked = fleet.hosts.pick(now, avoid=self._lost_host, builds=self.task.builds)
        self.host = picked.host
        if not self.host:
            self._wake_at = now + self.rules.retry_after_s
            return []
        self._wake_at, self.picked = None, picked
        home, home_terms = fleet.seat(self.id)
        return [
            e.AcquireBox(
                episode=self.key,
                host=self.host,
                task=self.task.name,
                task_digest=self.task.digest,
                limits=self.rules.limits,
                fresh=self._fresh or self._rebuilds > 0,
                waited_s=now - self._waits_since,
                why=picked.why,
                terms=picked.terms,
                home=home,
                home_terms=home_terms,
            )
        ]

    @property
    def _wants_box(self) -> bool:
        return self.phase is Phase.BOX or (self.phase is Phase.REPLAY and not self.box)

    def on_box(self, event: e.BoxAcquired, fleet: Fleet, now: float) -> Commands:
        if not self._wants_box:
            return [e.ReleaseBox(event.episode, event.host, event.box)]
        self.box, self.host, self._retries = event.box, event.host, 0
        self._waits_since = None
        account = self.account
        account.started_unix_s = account.started_unix_s or event.start_unix_s
        account.spend(EpisodeState.BOX_START, event.start_unix_s, event.end_unix_s)
        return self._has_box(event, fleet, now)

    def on_box_refused(self, event: e.BoxRefused, fleet: Fleet, now: float) -> Commands:
        if not self._wants_box or self._wake_at is not None:
            return []  # no request is under way that this could answer
        fleet.hosts.box_gone(event.host)
        fleet.hosts.failed(event.host, now)
        self._retries += 1
        if event.network_need:
            return self._lose(Failure.NETWORK_NEED, event.detail)
        if event.retryable and self._retries <= self.rules.box_retries_max:
            self._wake_at = now + self.rules.retry_after_s
            return []
        return self._lose(Failure.BOX_START, event.detail)

    def _restore_box(self, reason: str, fleet: Fleet, now: float) -> Commands:
        """Rebuild the box elsewhere, unless that was tried often enough."""
        if self._killed_hosts >= 2 or self._rebuilds >= self._replays_max:
            return self._lose(Failure.HOST_LOST, reason)
        fleet.hosts.box_gone(self.host)
        fleet.hosts.failed(self.host, now)
        self._lost_box(reason)
        lost = self._release()  # it may live on, unseen
        self._lost_host, self._rebuilds = self.host, self._rebuilds + 1
        self.phase, self.box, self._retries = Phase.REPLAY, "", 0
        return [*lost, *self.start(fleet, now)]

    @property
    def _killed_hosts(self) -> int:
        """Most hosts that one and the same command took with it."""
        return max((len(hosts) for hosts in self._killed.values()), default=0)

    # -- end ------------------------------------------------------------------------

    def _verify(self) -> Commands:
        self.phase, self._wake_at = Phase.VERIFY, None
        at = (self.key, self.host, self.box)
        return [e.Verify(*at, self.task.verify_timeout_s, self._ran)]

    def on_verdict(self, event: e.VerdictGiven) -> Commands:
        if self.phase is not Phase.VERIFY:
            return []
        self.account.spend(EpisodeState.VERIFY, event.start_unix_s, event.end_unix_s)
        verdict = Verdict(event.status, event.reward, event.detail)
        self._verdicts = (*self._verdicts, verdict)
        if needs_rerun(verdict) and len(self._verdicts) < 2:
            return self._verify()
        return self._finish()

    def on_verify_failed(self, event: e.VerifyFailed, fleet: Fleet, now: float) -> Commands:
        if self.phase is not Phase.VERIFY:
            return []
        if event.loss is e.Loss.BOX_GONE:
            return self._restore_box(event.detail, fleet, now)
        self._retries += 1
        if self._retries <= self.rules.verify_retries_max:
            return self._verify()
        if event.loss is e.Loss.BOX_KILLED:
            return self._restore_box(event.detail, fleet, now)
        return self._lose(Failure.SERVICE_CALL, event.detail)

    def _lose(self, failure: Failure, detail: str) -> Commands:
        """Something that is not the model's doing ended the attempt."""
        self._end, self._failure, self._detail = End.INFRA, failure, detail
        return self._finish()

    def _finish(self) -> Commands:
        self.phase, self._wake_at = Phase.FINISH, None
        account = self.account
        self.label = judge(
            Evidence(
                end=self._end or End.INFRA,
                failure=self._failure,
                detail=self._detail[:500],
                threshold=self.task.threshold,
                limit=account.limit,
                starved=account.starved,
                actions=account.actions,
                tokens=account.tokens,
                killed_hosts=self._killed_hosts,
                verdicts=self._verdicts,
                wall_s=account.wall_s,
                cpu_s=account.cpu_s,
                cpu_stall_s=account.cpu_stall_s,
                replays=self.replays,
            )
        )
        return [
            e.RecordEpisode(
                episode=self.key,
                label=self.label,
                turns=self.turns_recorded,
                host=self.host,
                intervals=account.take_intervals(),
                started_unix_s=account.started_unix_s,
                finished_unix_s=account.last_unix_s,
            )
        ]

    def on_finished(self) -> Commands:
        """The label is durable: till then the box was of use to a router that takes over."""
        self.phase = Phase.OVER
        return [*self._release(), e.DropConversation(self.key)]

    def cancel(self, fleet: Fleet) -> Commands:
        """Stop at once and leave no record: the job is no longer wanted.

        A box still being started is counted until its answer comes, which then gives it back.
        """
        commands: Commands = []
        fleet.session_over(self.id)
        if self.box:
            fleet.hosts.box_gone(self.host)
        if self.phase is Phase.GENERATE:
            commands.append(e.AbortGenerate(self.key, self.replica, self.turn, self._retry))
        commands += self._release()
        self.phase = Phase.OVER
        return [*commands, e.DropConversation(self.key)]

    def _release(self) -> Commands:
        return [e.ReleaseBox(self.key, self.host, self.box)] if self.box else []
