"""Which replicas may take turns: proven in this life, serving the newest version, moving on.

Owns: per replica its life, its standing, its credit's end, the pauses between probes, how slow it
is. Promise: pure; a replica takes a turn only after a process of that life has answered a short
real request (a health check that a wedged engine still answers proves nothing); one that hangs, is
silent, lags behind or stopped serving is named once as lost, so that its conversations move, and is
proven anew before it comes back. Without `probes` everything listed is admitted. Does not cover:
who is placed where (placements.py), the calls (adapters/replicas.py).
Source: a wedge is seen by steps that stand still while requests run, as vLLM's own health check
does not (it answers from another process).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from statistics import median_low

from services.router.events import ProbeReplica, ReplicaProbed, ReplicaSilent, ReplicaTold
from services.router.rules import RouterRules

_SUSPECT_S = 2.0  # how long others are preferred after a failed call
_FAILURES_MAX = 3  # calls in a row that fail before it has to be proven anew
_START_S = 5.0  # how long launches wait for the first probes of a fleet
_SLACK_S = 15.0  # over a probe's own deadline, until its end counts as never told
_WEIGHT = 0.1  # of the newest answer in the running mean
_ANSWERS_MIN = 5  # before the mean says anything


class Standing(StrEnum):
    """Of one replica; only WELL takes turns."""

    NEW = "new"  # of this life nothing is proven
    PROBING = "probing"
    WELL = "well"
    WEDGED = "wedged"  # requests ran and its engine took no step
    SILENT = "silent"  # it did not answer for too long
    OLD = "old"  # it serves an older version than the newest published
    FENCED = "fenced"  # it says itself that it serves nothing


_UNTIL_TOLD = (Standing.OLD, Standing.FENCED)  # ends by its own word alone


class _Known:
    """One listed replica."""

    def __init__(self) -> None:
        self.standing = Standing.NEW
        self.listed = True
        self.proven = False  # ever
        self.gone_since = 0.0
        self.holds = False  # conversations may be there
        self.told: ReplicaTold | None = None
        self.told_at = 0.0
        self.moved_at = 0.0  # its engine took a step, or had nothing to do
        self.silent_since: float | None = None
        self.behind_since: float | None = None
        self.probe_at, self.pause_s = 0.0, 0.0  # not before; pause after the last failed probe
        self.probe_life, self.probe_ends = "", 0.0  # of the one on its way; "": none
        self.detail = ""  # why the last probe failed, or it was silent
        self.suspect_until = 0.0
        self.failures = 0  # in a row
        self.lose = False  # a probe failed while conversations may be there
        self.ratio, self.answers = 1.0, 0  # running mean of seconds taken / predicted
        self.idle_since: float | None = None

    @property
    def life(self) -> str:
        return self.told.life if self.told is not None else ""

    def credit_ends(self) -> float:
        return self.told_at + self.told.ttl_s if self.told is not None else 0.0

    def unproven(self, standing: Standing = Standing.NEW, now: float = 0.0) -> None:
        """It has to pass a probe before it takes a turn, at once."""
        self.standing, self.probe_at, self.pause_s = standing, now, 0.0

    def leave(self) -> bool:
        """Name its conversations as lost, once."""
        held, self.holds, self.lose = self.holds, False, False
        return held


class Health:
    """What is known of the health of all replicas of a run."""

    def __init__(self, rules: RouterRules):
        self._rules = rules
        self._known: dict[str, _Known] = {}
        self._median = 1.0
        self._began = 0.0  # when the first replicas were announced

    # -- what is heard -----------------------------------------------------------------

    def listed(self, replicas: Collection[str], now: float) -> tuple[str, ...]:
        """Take the announced replicas; answers those gone whose conversations have to move.

        With probes, one whose credit still runs keeps what runs there until that ends (a registry
        that was away is no sign of a replica's end): `lost` names it then.
        """
        if not self._known:
            self._began = now
        for id_ in replicas:
            if id_ not in self._known:
                self._known[id_] = _Known()
            self._known[id_].listed = True
        gone: list[str] = []
        for id_ in self._known.keys() - set(replicas):
            one = self._known[id_]
            if one.listed:
                one.listed, one.gone_since = False, now
            if not self._rules.probes or not one.holds or now >= one.credit_ends():
                del self._known[id_]
                gone.append(id_)
        self._reckon_median()
        return tuple(sorted(gone))

    def told(self, event: ReplicaTold, version: int, now: float) -> tuple[str, ...]:
        """A replica answered; `version`: the newest one published.

        Answers it when its conversations have to move now: another life, no longer serving, or
        weights that are too old.
        """
        one = self._known.get(event.replica)
        if one is None or not self._rules.probes:
            return ()
        lost = self._heard(one, event, now)
        blocked = self._blocked(one, event, version, now)
        if blocked is not None:
            one.standing = blocked
            lost = one.leave() or lost
        elif one.standing in _UNTIL_TOLD or one.standing is Standing.SILENT:
            one.unproven(now=now)
        self._reckon_median()
        return (event.replica,) if lost else ()

    def _heard(self, one: _Known, event: ReplicaTold, now: float) -> bool:
        """Take its word; True when this is another life and conversations were on the former."""
        former, lost = one.told, False
        reborn = former is None or _life(former) != _life(event)
        if former is not None and event.version > former.version:
            one.behind_since = None  # it follows
        if reborn:
            lost = one.leave()
            one.unproven(now=now)
            one.behind_since, one.failures, one.answers, one.ratio = None, 0, 0, 1.0
        idle = event.running + event.waiting == 0
        if former is None or reborn or idle or event.updating or former.steps != event.steps:
            one.moved_at = now
        if not idle:
            one.idle_since = None
        elif one.idle_since is None:
            one.idle_since = now
        elif now - one.idle_since >= self._rules.probe_pause_max_s:
            one.answers, one.ratio = 0, 1.0  # of long ago: it may have recovered
        one.told, one.told_at, one.silent_since = event, now, None
        return lost

    def _blocked(
        self, one: _Known, event: ReplicaTold, version: int, now: float
    ) -> Standing | None:
        """Why by its own word it takes no turn."""
        if not event.serving:
            return Standing.FENCED
        if event.version >= version:
            one.behind_since = None
            return None
        if one.behind_since is None or event.updating:
            one.behind_since = now
        # A version reaches replicas one by one: one that is well is given time for it.
        patient = one.standing is Standing.WELL and now - one.behind_since < self._rules.wedge_s
        return None if patient else Standing.OLD

    def silent(self, event: ReplicaSilent, now: float) -> None:
        """It did not answer: others are preferred, and after a while it is lost."""
        one = self._known.get(event.replica)
        if one is None:
            return
        one.detail = event.detail
        if one.silent_since is None:
            one.silent_since = now
        if self._rules.probes:
            one.suspect_until = now + _SUSPECT_S

    def probed(self, event: ReplicaProbed, now: float) -> None:
        """A probe is over; one of another life, or that is not waited for, says nothing."""
        one = self._known.get(event.replica)
        if one is None or one.probe_life != event.life:
            return
        one.probe_life = ""
        if one.standing is not Standing.PROBING:  # since then it said that it serves nothing
            return
        if event.passed:
            one.standing, one.holds, one.pause_s, one.failures = Standing.WELL, True, 0.0, 0
            one.detail, one.suspect_until, one.proven, one.moved_at = "", 0.0, True, now
            return
        if event.full:  # what runs there goes on: whether it does, its steps say
            one.standing, one.detail = Standing.NEW, event.detail
            one.probe_at = now + self._rules.probe_pause_s
            return
        self._probe_failed(one, event.detail, now)

    def _probe_failed(self, one: _Known, detail: str, now: float) -> None:
        rules = self._rules
        one.standing, one.detail, one.lose = Standing.NEW, detail, one.holds
        one.pause_s = min(max(2 * one.pause_s, rules.probe_pause_s), rules.probe_pause_max_s)
        one.probe_at = now + one.pause_s

    def failed(self, replica: str, now: float) -> None:
        """It failed a call: others are preferred for a while; soon it has to be proven anew."""
        one = self._known.get(replica)
        if one is None:
            return
        one.suspect_until = now + _SUSPECT_S
        one.failures += 1
        if one.failures >= _FAILURES_MAX and one.standing is Standing.WELL:
            one.unproven(now=now)

    def answered(self, replica: str, predicted_s: float, took_s: float) -> None:
        """It answered a turn that was thought to take `predicted_s`."""
        one = self._known.get(replica)
        if one is None:
            return
        one.failures = 0
        if predicted_s <= 0:
            return
        one.answers += 1
        weight = max(_WEIGHT, 1 / one.answers)
        one.ratio += weight * (took_s / predicted_s - one.ratio)

    # -- what follows ------------------------------------------------------------------

    def due(self, now: float) -> list[ProbeReplica]:
        """Probes to send now: one at a time and replica, after a pause where one failed."""
        if not self._rules.probes:
            return []
        found: list[ProbeReplica] = []
        for id_ in sorted(self._known):
            one = self._known[id_]
            if one.probe_life and now >= one.probe_ends:
                one.probe_life = ""
                if one.standing is Standing.PROBING:
                    self._probe_failed(one, "its end was never told", now)
            if self._wants_probe(one, now):
                one.standing, one.probe_life = Standing.PROBING, one.life
                one.probe_ends = now + self._rules.probe_timeout_s + _SLACK_S
                found.append(ProbeReplica(id_, one.life, self._rules.probe_timeout_s))
        return found

    def _wants_probe(self, one: _Known, now: float) -> bool:
        heard = one.told is not None and now < one.credit_ends()
        return (
            one.listed
            and heard
            and one.probe_life != one.life
            and one.standing in (Standing.NEW, Standing.WEDGED)
            and now >= one.probe_at
        )

    def lost(self, now: float) -> tuple[str, ...]:
        """Replicas whose conversations have to move, each named once."""
        found: list[str] = []
        for id_ in sorted(self._known) if self._rules.probes else ():
            one = self._known[id_]
            standing = self._lost_as(one, now)
            if standing is None or not one.leave():
                continue
            found.append(id_)
            if not one.listed:
                del self._known[id_]
            elif standing is not Standing.PROBING:
                one.unproven(standing, now + self._rules.probe_pause_s)
        return tuple(found)

    def _lost_as(self, one: _Known, now: float) -> Standing | None:
        """How it is lost, if it is; PROBING: a probe failed, its standing stays."""
        if not one.holds:
            return None
        if not one.listed and now >= one.credit_ends():
            return Standing.SILENT
        if one.silent_since is not None and now - one.silent_since >= self._rules.wedge_s:
            return Standing.SILENT
        if one.told_at - one.moved_at >= self._rules.wedge_s:
            return Standing.WEDGED
        return Standing.PROBING if one.lose else None

    # -- questions ---------------------------------------------------------------------

    def admits(self, replica: str, now: float) -> bool:
        """Whether it may take a turn."""
        one = self._known.get(replica)
        if one is None or not one.listed:
            return False
        if not self._rules.probes:
            return True
        return one.standing is Standing.WELL and now < one.credit_ends()

    def starting(self, now: float) -> bool:
        """Whether the first replicas of a fleet are still being proven: new conversations had
        better wait, else the first that is proven gets them all. No later one is waited for: one
        that starts over and over would stop all launches."""
        if not self._rules.probes or now - self._began >= _START_S:
            return False
        return any(one.listed and not one.proven for one in self._known.values())

    def suspect(self, replica: str, now: float) -> bool:
        """Whether others are to be preferred: it failed a call, or was silent, just now."""
        one = self._known.get(replica)
        return one is not None and one.suspect_until > now

    def slow(self, replica: str) -> float:
        """How many times slower than the median it is; 1 while too little is known."""
        one = self._known.get(replica)
        if one is None or one.answers < _ANSWERS_MIN or self._median <= 0:
            return 1.0
        return one.ratio / self._median

    def _reckon_median(self) -> None:
        """Of those that take turns and answered enough; of two the faster, so that one can be the
        slower. One that takes none is no measure: the only one left would be slow beside it."""
        well = [k for k in self._known.values() if k.standing is Standing.WELL]
        ratios = [k.ratio for k in well if k.answers >= _ANSWERS_MIN]
        self._median = median_low(ratios) if ratios else 1.0

    def why(self, replica: str, now: float) -> str:
        """Why it takes no turn, for people; "" when it does."""
        one = self._known.get(replica)
        if one is None or not one.listed:
            return f"{replica} is not announced"
        if self.admits(replica, now):
            return ""
        if one.told is None:
            return f"{replica} has not answered yet{_because(one.detail)}"
        if one.standing is Standing.FENCED:
            return f"{replica} serves nothing{_because(one.told.detail)}"
        if one.standing is Standing.OLD:
            return f"{replica} serves version {one.told.version}, an older one than is published"
        if one.standing is Standing.SILENT or now >= one.credit_ends():
            silent_s = now - one.told_at
            return f"{replica} has not answered for {silent_s:.0f} s{_because(one.detail)}"
        return self._unproven(replica, one, now)

    def _unproven(self, replica: str, one: _Known, now: float) -> str:
        if one.standing is Standing.PROBING:
            return f"{replica} answers a probe first"
        reason = _because(one.detail)
        if one.standing is Standing.WEDGED:
            reason = f": its engine took no step for {self._rules.wedge_s:.0f} s"
        wait_s = max(0.0, one.probe_at - now)
        return f"{replica} is probed again in {wait_s:.0f} s{reason}"


def _life(told: ReplicaTold) -> tuple[str, int]:
    """What a cache belongs to: blocks of another size are another cache."""
    return told.life, told.block_size


def _because(detail: str) -> str:
    return f": {detail}" if detail else ""
