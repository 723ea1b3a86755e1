"""Supervise stand-ins: run.py STATE_DIR MODE... ; one JSON line per report, then how it ended.

MODE is of stand_in.py, or `pair`: two that lead or stand by as router.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from muster.config import Config
from muster.supervise import plan, state
from muster.supervise.machine import Report, Rules, ServiceRule
from muster.supervise.resolved import resolve, toml_of
from muster.supervisor import Supervisor

_STAND_IN = str(Path(__file__).with_name("stand_in.py"))


def _say(data: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


def _show(report: Report) -> None:
    _say({"service": report.service, "phase": report.phase, "detail": report.detail})


def main() -> None:
    state_dir, modes = Path(sys.argv[1]), sys.argv[2:]
    config = Config(state_dir=state_dir)
    claim, cleared = state.claim(state_dir)
    _say({"cleared": cleared})
    (state_dir / "redis").mkdir(exist_ok=True)
    file = str(plan.config_file(claim.runtime))
    services = [*plan.plan(config, claim.runtime, only=())]
    for index, mode in enumerate(modes):
        name = f"s{index}"
        command = (sys.executable, _STAND_IN, name, mode, file)
        rule = ServiceRule(name, after=("redis",))
        services.append(plan.Service(rule, command, f"stand.in.{name}"))
    if "pair" in modes:
        services = [s for s in services if s.rule.last]
        command = (sys.executable, _STAND_IN, "router", "lead", file)
        for name, after in (("router", ("redis",)), ("router-2", ("redis", "router"))):
            rule = ServiceRule(name, after)
            services.append(plan.Service(rule, command, "stand.in.router", "router"))
    resolved = resolve(config, redis_url=plan.redis_url(config, claim.runtime), model="")
    Path(file).write_text(toml_of(resolved))
    rules = Rules(tuple(s.rule for s in services), grace_s=2.0, last_s=2.0)
    supervisor = Supervisor(resolved, claim, services, show=_show, rules=rules)
    try:
        ended = asyncio.run(supervisor.run())
        _say({"status": ended.status, "line": ended.line, "interrupted": ended.interrupted})
    finally:
        claim.release()


if __name__ == "__main__":
    main()
