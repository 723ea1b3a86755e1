"""SWE-ReX's local runtime, timed in an environment of its own: run by `bench.sandbox --swe-rex`.

    PYTHON bench/_swe_rex.py ROUNDS

Prints one JSON object, operation → milliseconds. `start` is a new bash session, `step_bash` a
command in it. The local runtime isolates nothing, limits nothing and shares the file system of the
machine, so it is the least that SWE-ReX itself costs. Imports nothing of Muster.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib import import_module
from typing import Any

_COMMAND = "echo hello"


async def _measure(rounds: int) -> dict[str, list[float]]:
    local, abstract = (import_module(f"swerex.runtime.{name}") for name in ("local", "abstract"))
    took: dict[str, list[float]] = {"start": [], "step_bash": [], "end": []}
    runtime = local.LocalRuntime()
    for number in range(rounds):
        session = f"s{number}"
        calls: tuple[tuple[str, Any], ...] = (
            ("start", lambda s: abstract.CreateBashSessionRequest(session=s, startup_timeout=30)),
            ("step_bash", lambda s: abstract.BashAction(command=_COMMAND, session=s, timeout=60)),
            ("end", lambda s: abstract.CloseBashSessionRequest(session=s)),
        )
        methods = (runtime.create_session, runtime.run_in_session, runtime.close_session)
        for (name, request), method in zip(calls, methods, strict=True):
            began = time.monotonic()
            await method(request(session))
            took[name].append((time.monotonic() - began) * 1000)
    await runtime.close()
    return took


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_measure(int(sys.argv[1])))))
