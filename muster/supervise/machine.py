"""Which service to start, when all are ready, what to do about a death, in which order to stop.

Pure. Promise: a service starts only while all that it needs is ready; a death is answered by a
restart, at most `restarts_max` in `window_s`, then by the end of everything with the reason; a
status of 2 before it was ever ready is a message for a person and not retried; a stop takes at most
grace_s + last_s (hard_s when the kernel holds a process), a second request kills at once.
Does not cover: processes (supervisor.py).
"""

from __future__ import annotations

from enum import StrEnum

from muster.types import Value


class ServiceRule(Value, frozen=True):
    """One service. `after`: must be ready before it starts; `outlives`: asked to stop later.

    `last`: all others write to it, so it is stopped when they are gone.
    """

    name: str
    after: tuple[str, ...] = ()
    outlives: tuple[str, ...] = ()
    ready_s: float = 120.0
    last: bool = False


class Rules(Value, frozen=True):
    """Start order is the order of `services`; all times in seconds."""

    services: tuple[ServiceRule, ...]
    restarts_max: int = 4
    window_s: float = 120.0
    backoff_s: float = 0.5
    again_s: float = 2.0  # between tries to start what cannot be started
    again_max_s: float = 600.0  # for which they go on, so that somebody can make room
    drain_s: float = 1.5  # wait for those that must stop first, before asking the others too
    grace_s: float = 6.0  # from the request to SIGKILL
    unready_grace_s: float = 3.0  # the same for what was never ready: it has nothing to save
    last_s: float = 1.5  # the same for what all others need, counted from the end of those
    hard_s: float = 9.0  # what is not gone by then cannot be ended (stuck in the kernel)


class Tick(Value, frozen=True, tag=True):
    """Time has passed."""


class Healthy(Value, frozen=True, tag=True):
    """A service answered its health check, or stands by; `remark` is for people."""

    service: str
    remark: str = ""


class Exited(Value, frozen=True, tag=True):
    """A service's process is gone; `line` is what its log says about it."""

    service: str
    status: int
    line: str


class NotStarted(Value, frozen=True, tag=True):
    """No process could be made for it; `line` says why: a full disk, say."""

    service: str
    line: str


class StopAsked(Value, frozen=True, tag=True):
    """A signal came, or the work is done."""


Event = Tick | Healthy | Exited | NotStarted | StopAsked


class Start(Value, frozen=True, tag=True):
    """Start the process."""

    service: str


class Terminate(Value, frozen=True, tag=True):
    """SIGTERM."""

    service: str


class Kill(Value, frozen=True, tag=True):
    """SIGKILL to it and all that descends from it."""

    service: str


class Report(Value, frozen=True, tag=True):
    """Tell people that a service changed its phase."""

    service: str
    phase: str
    detail: str = ""


class AllReady(Value, frozen=True, tag=True):
    """Every service is ready for the first time."""


class Finish(Value, frozen=True, tag=True):
    """All are gone; `line` says why if it was not asked for."""

    status: int
    line: str


Command = Start | Terminate | Kill | Report | AllReady | Finish


class Phase(StrEnum):
    """Where a service is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    GONE = "gone"


_ALIVE = (Phase.STARTING, Phase.READY, Phase.STOPPING)


class _Service:
    def __init__(self, rule: ServiceRule):
        self.rule, self.phase, self.since = rule, Phase.WAITING, 0.0
        self.deaths: list[float] = []
        self.not_started = -1.0  # since when it cannot be
        self.killed = self.was_ready = False


class SupervisorMachine:
    """See the module."""

    def __init__(self, rules: Rules):
        self._rules = rules
        self._services = {rule.name: _Service(rule) for rule in rules.services}
        self._announced = self._finished = False
        self._stop_at: float | None = None
        self._last_at: float | None = None
        self._status, self._line = 0, ""

    def handle(self, event: Event, now: float) -> list[Command]:
        """One event; commands in the order in which they are to be done."""
        commands: list[Command] = []
        match event:
            case Healthy(name, remark):
                commands += self._healthy(self._services[name], remark, now)
            case Exited():
                commands += self._exited(event, now)
            case NotStarted():
                commands += self._not_started(event, now)
            case StopAsked():
                commands += self._stop_asked(now)
            case Tick():
                pass
        if self._stop_at is None:
            commands += self._advance(now)
        if self._stop_at is not None:
            commands += self._stop(now)
        return commands

    def _move(self, service: _Service, phase: Phase, now: float, detail: str = "") -> Report:
        service.phase, service.since = phase, now
        return Report(service.rule.name, phase, detail)

    def _healthy(self, service: _Service, remark: str, now: float) -> list[Command]:
        if service.phase is not Phase.STARTING:
            return []
        service.was_ready, service.not_started = True, -1.0
        detail = f"{now - service.since:.1f} s" + (f", {remark}" if remark else "")
        commands: list[Command] = [self._move(service, Phase.READY, now, detail)]
        if not self._announced and all(s.phase is Phase.READY for s in self._services.values()):
            self._announced = True
            commands.append(AllReady())
        return commands

    def _exited(self, event: Exited, now: float) -> list[Command]:
        service = self._services[event.service]
        if self._stop_at is not None:
            return [self._move(service, Phase.GONE, now)]
        window = now - self._rules.window_s
        service.deaths = [*(t for t in service.deaths if t > window), now]
        if event.status == 2 and not service.was_ready:
            return [self._move(service, Phase.GONE, now), *self._give_up(event.line, now)]
        if len(service.deaths) > self._rules.restarts_max:
            line = (
                f"{event.service} ended {len(service.deaths)} times within "
                f"{self._rules.window_s:.0f} s, last with status {event.status}: {event.line}"
            )
            return [self._move(service, Phase.GONE, now), *self._give_up(line, now)]
        why = f"ended with status {event.status}: {event.line}"
        return [self._move(service, Phase.RESTARTING, now, why)]

    def _not_started(self, event: NotStarted, now: float) -> list[Command]:
        """Not a death: whatever stands in the way may go."""
        service = self._services[event.service]
        if self._stop_at is not None:
            return [self._move(service, Phase.GONE, now)]
        told = service.not_started >= 0
        service.not_started = service.not_started if told else now
        if now - service.not_started > self._rules.again_max_s:
            line = f"{event.service} could not be started for {self._rules.again_max_s:.0f} s: "
            return [self._move(service, Phase.GONE, now), *self._give_up(line + event.line, now)]
        report = self._move(service, Phase.RESTARTING, now, event.line)
        return [] if told else [report]

    def _give_up(self, line: str, now: float) -> list[Command]:
        self._status, self._line = 2, line
        return self._stop_asked(now)

    def _advance(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for service in self._services.values():
            if service.phase is Phase.WAITING or self._backed_off(service, now):
                needs = (self._services[name].phase for name in service.rule.after)
                if all(phase is Phase.READY for phase in needs):
                    report = self._move(service, Phase.STARTING, now)
                    commands += [report] if service.not_started < 0 else []
                    commands.append(Start(service.rule.name))
            elif service.phase is Phase.STARTING and now - service.since > service.rule.ready_s:
                name, limit = service.rule.name, service.rule.ready_s
                line = f"{name} is not ready after {limit:.0f} s; its log says why: logs/{name}.log"
                return commands + self._give_up(line, now)
        return commands

    def _backed_off(self, service: _Service, now: float) -> bool:
        wait = self._rules.backoff_s * 2 ** (len(service.deaths) - 1)
        if service.not_started >= 0:
            wait = self._rules.again_s
        return service.phase is Phase.RESTARTING and now - service.since >= wait

    def _stop_asked(self, now: float) -> list[Command]:
        if self._stop_at is None:
            self._stop_at = now
            idle = [s for s in self._services.values() if s.phase not in _ALIVE]
            for service in idle:
                service.phase = Phase.GONE
            return []
        alive = [s for s in reversed(self._services.values()) if s.phase in _ALIVE]
        return [command for s in alive for command in self._kill(s)]

    def _stop(self, now: float) -> list[Command]:
        assert self._stop_at is not None
        commands: list[Command] = []
        for service in reversed(self._services.values()):
            if service.phase in (Phase.STARTING, Phase.READY) and self._may_stop(service, now):
                commands.append(self._move(service, Phase.STOPPING, now))
                commands.append(Terminate(service.rule.name))
            if service.phase in _ALIVE and now >= self._deadline(service):
                commands += self._kill(service)
        stuck = [s.rule.name for s in self._services.values() if s.phase is not Phase.GONE]
        if not self._finished and (not stuck or now >= self._stop_at + self._rules.hard_s):
            self._finished = True
            line = self._line or (f"could not be ended: {', '.join(stuck)}" if stuck else "")
            commands.append(Finish(2 if line else self._status, line))
        return commands

    def _may_stop(self, service: _Service, now: float) -> bool:
        assert self._stop_at is not None
        if service.rule.last:
            others = [s for s in self._services.values() if not s.rule.last]
            gone = all(s.phase is Phase.GONE for s in others)
            if gone and self._last_at is None:
                self._last_at = now
            return gone
        first = [self._services[n] for n in service.rule.outlives if n in self._services]
        drained = all(s.phase is Phase.GONE for s in first)
        return drained or now - self._stop_at >= self._rules.drain_s

    def _deadline(self, service: _Service) -> float:
        assert self._stop_at is not None
        if not service.rule.last:
            rules = self._rules
            ready = service.was_ready
            return self._stop_at + (rules.grace_s if ready else rules.unready_grace_s)
        return float("inf") if self._last_at is None else self._last_at + self._rules.last_s

    def _kill(self, service: _Service) -> list[Command]:
        if service.killed:
            return []
        service.killed = True
        return [Kill(service.rule.name)]
