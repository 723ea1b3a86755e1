"""What waits, for what, since when, who has to move: said from the router's own state.

Owns: the words, the order (outermost first, longest wait first), how long things stand. Promise:
pure; every line names an owner, and a command that leads further; nothing is said of what has
ended. Does not cover: batches (the bank explains them), the wire (server.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from muster.types import Waiting
from services.router import choices
from services.router import events as e
from services.router.episode import Episode, Phase
from services.router.fleet import Fleet
from services.router.jobs import Group, Job, JobState
from services.router.progress import Reason

_SIBLINGS_MAX = 16  # lines of one answer; groups may be larger
_COMMAND_SHOWN = 120
# Whose doing a failure by infrastructure was, by its cause; else the router tells more.
_LOGS = {"box_start": "sandbox", "host_lost": "sandbox", "engine": "inference"}
# What brings a run further. Failures, refusals, lists of peers, and boxes and attempts that begin
# or end without a verdict come by the dozen where nothing works.
PROGRESS = frozenset(
    {
        e.JobSubmitted,
        e.JobCancelled,
        e.RecoveryEnded,
        e.VersionPublished,
        e.BatchTrained,
        e.FateRecorded,
        e.GroupRecorded,
        e.Generated,
        e.ContextFull,
        e.StepFinished,
        e.TurnRecorded,
        e.VerdictGiven,
    }
)


class Watch:
    """Since when each episode is where it is, and when anything last moved. Steady seconds."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[Phase, int, float]] = {}
        self.moved = 0.0
        self.told = 0.0

    def saw(self, id_: str, episode: Episode | None, now: float) -> None:
        """An event of this episode was handled; None when it is over."""
        if episode is None:
            self._since.pop(id_, None)
            return
        phase, turn, _ = self._since.get(id_, (None, -1, 0.0))
        if (phase, turn) != (episode.phase, episode.turn):
            self._since[id_] = (episode.phase, episode.turn, now)

    def saw_all(self, episodes: Mapping[str, Episode], now: float) -> None:
        """Time passed: whatever moved or ended without an event of its own."""
        for gone in self._since.keys() - episodes.keys():
            del self._since[gone]
        for id_, episode in episodes.items():
            self.saw(id_, episode, now)

    def since(self, id_: str, now: float) -> float:
        """When it came to be where it is; `now` for one that was never seen to move."""
        return self._since.get(id_, (None, 0, now))[2]

    def stalled(self, now: float, stall_s: float) -> bool:
        """True once per `stall_s` while nothing moves."""
        if now - max(self.moved, self.told) < stall_s:
            return False
        self.told = now
        return True


@dataclass
class Picture:
    """The router's state as far as it is explained. `now` steady, `unix_now` wall seconds."""

    run: str
    jobs: Mapping[str, Job]
    groups: Mapping[str, Group]
    episodes: Mapping[str, Episode]
    reasons: Mapping[str, Reason]  # job → why it launches nothing more
    watch: Watch
    fleet: Fleet
    now: float
    unix_now: float
    logs: str = "logs"

    def since(self, id_: str) -> float:
        """Unix seconds since which an episode is where it is."""
        return self.unix_now - (self.now - self.watch.since(id_, self.now))


def of_run(picture: Picture) -> list[Waiting]:
    """Replicas that take no turns, its running jobs, then the group that stands longest, then what
    blocks that group."""
    running = [job for job in picture.jobs.values() if job.state is JobState.RUNNING]
    if not running:
        count = len(picture.jobs)
        ended = f"{count} job{'s' * (count > 1)} ended" if count else "no job was submitted"
        return [Waiting(picture.run, ended, owner="client", next_command="muster submit tasks/")]
    lines = _replicas(picture)
    lines += [line for job in running for line in (_job(job, picture), *_failure(job))]
    open_ = [g for g in picture.groups.values() if not g.complete]
    oldest = min(open_, key=lambda g: (_longest(g, picture), g.id), default=None)
    if oldest is not None:
        lines += of_group(oldest, picture)
    return lines


def _replicas(picture: Picture) -> list[Waiting]:
    """Those that take no turns while others do; where none does, that is what the jobs wait for."""
    fleet, now = picture.fleet, picture.now
    if fleet.why_none(now):
        return []
    told = [(id_, fleet.health.why(id_, now)) for id_ in sorted(fleet.loads.loads)]
    out = [(id_, why) for id_, why in told if why][:_SIBLINGS_MAX]
    then = _tail(picture.logs, "inference")
    return [
        Waiting(f"replica {id_}", f"takes no turns: {why}", "", 0.0, "", then) for id_, why in out
    ]


def of_group(group: Group, picture: Picture) -> list[Waiting]:
    """The group, then each of its siblings that has not ended, longest wait first."""
    ended = sum(s.label is not None for s in group.siblings)
    state = f"{ended} of {len(group.siblings)} siblings ended"
    if group.complete:
        return [_complete(group, state, picture)]
    lines = [
        _sibling(group, number, picture)
        for number, sibling in enumerate(group.siblings)
        if sibling.label is None
    ]
    lines.sort(key=lambda line: (line.since_unix_s or picture.unix_now, line.subject))
    lines = [*_failure(group), *lines]
    first = lines[0]
    head = Waiting(
        subject=group.id,
        state=state,
        waits_for=f"{first.subject}: {first.state}",
        since_unix_s=first.since_unix_s,
        owner=first.owner,
        next_command=f"muster explain {first.subject}",
    )
    return [head, *lines[:_SIBLINGS_MAX]]


def _complete(group: Group, state: str, picture: Picture) -> Waiting:
    """Its batch may lack other groups; what the batch lacks beyond them the bank knows."""
    if group.evaluates:
        waits = "its fate: the bank counts it"
        return Waiting(group.id, f"{state}: complete", waits, 0.0, "readybank", "muster explain")
    others = [g for g in picture.groups.values() if not g.complete and not g.evaluates]
    waits, owner, then = "a batch, or its fate", "readybank", "muster explain batch"
    reason = picture.reasons.get(group.job, Reason())
    if not others and reason.text:
        waits, owner = f"a batch, which waits for {reason.text}", reason.owner
    if others:
        first = min(others, key=lambda g: (_longest(g, picture), g.id)).id
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        waits = f"a batch, which waits for groups that are open: {first}{more}"
        owner, then = "router", f"muster explain {first}"
    return Waiting(group.id, f"{state}: complete", waits, 0.0, owner, then)


def of_episode(episode: Episode, picture: Picture) -> Waiting:
    """What one attempt is doing."""
    state, waits_for, owner, log = _doing(episode, picture)
    group = picture.groups.get(episode.key.group)
    # A step and a verification end by themselves, at their limits: no log tells more of them.
    ends = group is not None and episode.phase in (Phase.STEP, Phase.VERIFY)
    then = f"muster watch {group.job}" if ends and group else ""
    first = picture.fleet.why_held(episode.id, picture.now)[1]
    if first and first != episode.id:
        then = f"muster explain {first}"
    return Waiting(
        subject=episode.id,
        state=state,
        waits_for=waits_for,
        since_unix_s=picture.since(episode.id),
        owner=owner,
        next_command=then or _tail(picture.logs, log),
    )


def find(subject: str, picture: Picture) -> list[Waiting]:
    """Of a run (empty subject or its name), job, group or episode; empty when unknown."""
    if subject in ("", picture.run):
        return of_run(picture)
    if subject in picture.jobs:
        groups = [g for g in picture.groups.values() if g.job == subject and not g.complete]
        lines = [_job(picture.jobs[subject], picture), *_failure(picture.jobs[subject])]
        return lines + [of_group(group, picture)[0] for group in groups[:_SIBLINGS_MAX]]
    if subject in picture.groups:
        return of_group(picture.groups[subject], picture)
    if subject in picture.episodes:
        episode = picture.episodes[subject]
        return [*choices.of(episode, picture.fleet), of_episode(episode, picture)]
    group, _, rest = subject.partition(".")
    number = rest.partition(".")[0]
    known = picture.groups.get(group)
    if known is None or not number.isdecimal() or int(number) >= len(known.siblings):
        return []
    failed = known.siblings[int(number)].failed
    if failed is not None and failed.episode == subject:
        log = _LOGS.get(failed.label.cause, "router")
        then = "muster hosts" if log == "sandbox" else _tail(picture.logs, log)
        return [Waiting(subject, f"ended: {failed.told}", next_command=then)]
    return [_sibling(known, int(number), picture)]


def _job(job: Job, picture: Picture) -> Waiting:
    done, wanted = job.fated, job.allowed
    if job.state is not JobState.RUNNING:
        ended = f"{job.state}: {done} of {wanted} groups have a fate"
        return Waiting(job.spec.id, ended, next_command="muster report")
    reason = picture.reasons.get(job.spec.id, Reason())
    running = [one for one in picture.episodes.values() if _of_job(one, job, picture.groups)]
    return Waiting(
        subject=job.spec.id,
        state=f"{job.state}: {done} of {wanted} groups have a fate, {len(running)} episodes run",
        waits_for=reason.text or ("its episodes" if running else "a place in the admission bound"),
        since_unix_s=min((picture.since(one.id) for one in running), default=0.0),
        owner=reason.owner,
        next_command=_then(reason, picture.logs) or f"muster explain {job.spec.id}",
    )


def _failure(of: Job | Group) -> list[Waiting]:
    """What infrastructure ended last, while nothing has ended well since; it stands first, for
    whatever else waits may well meet the same."""
    failed = of.failed
    if failed is None or (isinstance(of, Job) and of.state is not JobState.RUNNING):
        return []
    then = f"muster explain {failed.episode}"
    waits = "whoever mends that; another attempt meets the same, unless it was a passing fault"
    return [Waiting(failed.episode, f"ended: {failed.told}", waits, 0.0, "", then)]


def _of_job(episode: Episode, job: Job, groups: Mapping[str, Group]) -> bool:
    group = groups.get(episode.key.group)
    return group is not None and group.job == job.spec.id


def _longest(group: Group, picture: Picture) -> float:
    """When the sibling that stands longest came to where it is."""
    ids = _ids(group, picture.episodes)
    return min((picture.watch.since(id_, picture.now) for id_ in ids), default=picture.now)


def _ids(group: Group, episodes: Collection[str]) -> list[str]:
    ids = [f"{group.id}.{n}.{s.attempt}" for n, s in enumerate(group.siblings)]
    return [id_ for id_ in ids if id_ in episodes]


def _sibling(group: Group, number: int, picture: Picture) -> Waiting:
    sibling = group.siblings[number]
    id_ = f"{group.id}.{number}.{sibling.attempt}"
    episode = picture.episodes.get(id_)
    if episode is not None:
        return of_episode(episode, picture)
    if sibling.label is not None:
        label = sibling.label
        ended = f"ended: {label.outcome} ({label.cause})"
        if sibling.failed is not None:
            ended = f"ended: {sibling.failed.told}"
        return Waiting(id_, ended, owner="readybank", next_command=f"muster explain {group.id}")
    reason, then = picture.reasons.get(group.job, Reason()), f"muster explain {group.job}"
    full = picture.fleet.why_no_room(picture.now)
    room = (
        f"room in a replica's KV cache ({full})" if full else "a place among the running episodes"
    )
    waits = reason.text or room
    return Waiting(id_, "not launched yet", waits, 0.0, reason.owner, then)


def _tail(logs: str, owner: str) -> str:
    """Shows the end of its log; each of several replicas has one of its own."""
    return f"tail -n 20 {logs}/{owner}{'*' if owner == 'inference' else ''}.log"


def _then(reason: Reason, logs: str) -> str:
    """What leads further than the job that waits for that reason; empty when it waits for none."""
    commands = {"client": "muster submit tasks/", "trainer": "muster explain batch"}
    then = commands.get(reason.owner, _tail(logs, reason.owner))
    return then if reason.text else ""


def _doing(episode: Episode, picture: Picture) -> tuple[str, str, str, str]:
    """State, what it waits for, who has to move, whose log."""
    turn, rules = episode.turn, episode.rules
    host = f"sandbox host {episode.host}" if episode.host else "a sandbox host"
    replica = f"replica {episode.replica}" if episode.replica else "an inference replica"
    match episode.phase:
        case Phase.BOX:
            other = " (or another host)" if episode.host else ""
            return "asks for a box", f"{host}{other}", host, "sandbox"
        case Phase.HOLD:
            why, _ = picture.fleet.why_held(episode.id, picture.now)
            none = picture.fleet.why_none(picture.now)
            waits = why or "a replica that takes it" + (f" ({none})" if none else "")
            return f"turn {turn}: held", waits, "inference", "inference"
        case Phase.GENERATE:
            limit = f"the reply, at most {rules.generate_timeout_s:g} s a try"
            return f"turn {turn}: the model replies", limit, replica, "inference"
        case Phase.STEP:
            command = " ".join(episode.command.split())[:_COMMAND_SHOWN]
            after = f"its limit of {episode.step_timeout_s:g} s, which ends it"
            limit = f"the end of the command, or {after}"
            return f"turn {turn}: runs `{command}`", limit, host, "sandbox"
        case Phase.REPLAY:
            return f"turn {turn}: its lost box is rebuilt", host, host, "sandbox"
        case Phase.VERIFY:
            limit = f"the verdict, at most {episode.task.verify_timeout_s:g} s"
            return "is verified", limit, host, "sandbox"
        case _:
            return f"turn {turn}: {episode.phase}", "Redis to make it durable", "redis", "redis"
