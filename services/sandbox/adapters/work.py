"""What runs in a box once it is somebody's: steps, verdicts, copies.

Owns: nothing; the records lie with each box. Promise: expected failures are returned: raised, they
would end the whole host. A step whose result is lost takes its box along; a verdict that cannot be
had now can be asked for again. Does not cover: who may ask (driver.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from muster import failpoints, telemetry
from muster.clock import monotonic
from muster.errors import InvalidInput, MusterError, Unavailable
from services.sandbox import environment, events, verdict
from services.sandbox.adapters import archives
from services.sandbox.adapters.callers import UsedBox, Verified, lost
from services.sandbox.adapters.orders import Orders
from services.sandbox.adapters.starts import log
from services.sandbox.box import CopiedFile, Evidence
from services.sandbox.ledger import StepRecord

ENDED = "the box was ended meanwhile"


async def step(
    orders: Orders, name: str, box: UsedBox, run: Callable[[], Awaitable[Evidence]]
) -> StepRecord | MusterError:
    """Run, or wait for, the step that its ledger has as running, and keep its answer."""
    began = monotonic()
    try:
        with telemetry.span("box.step", box=name):
            evidence = await run()
        await failpoints.at("sandbox.keep.before")
    except Exception as failure:  # noqa: BLE001 - one box must not end the host
        if name not in orders.boxes:
            return lost(ENDED, name)
        orders.counts.failures["step"] += 1
        log("box %s is lost with a step", name, failure)
        box.ledger.lose(f"the result of a step was lost ({failure})")
        orders.feed(events.Released(name))  # it could take no other step
        return lost(f"the box is lost with the result of its step: {failure}")
    record = box.ledger.finish(evidence)
    orders.counts.steps += 1
    orders.counts.took("step", monotonic() - began)
    try:
        await failpoints.at("sandbox.keep.after")
    except Unavailable as told:
        return told
    return record


async def judge(
    orders: Orders, slots: asyncio.Semaphore, name: str, box: UsedBox
) -> Verified | MusterError:
    """The verdict of a box: over its sealed files, or beside its processes, which end then."""
    spec = environment.judge_spec(box.task, box.files, box.limits)
    if orders.backend.builds:  # which knows the image's folder, where the task names none
        spec = replace(spec, cwd=box.setup.session.cwd)
    spec = environment.bounded(spec, orders.config.verify_timeout_s_max)
    async with slots:
        began = monotonic()
        try:
            with telemetry.span("box.verify", box=name):
                if not spec.live:
                    await orders.backend.seal(name)
                judged = await orders.backend.judge(name, spec)
                found = Verified(verdict.read(judged, box.task.verdict), judged.evidence)
                if spec.live:
                    box.final = found  # the service that was judged is gone
                    await orders.backend.seal(name)
        except Exception as failure:  # noqa: BLE001 - one box must not end the host
            log("box %s could not be judged", name, failure)
            orders.counts.failures["verify"] += 1
            if box.final is None:
                way_out = "ask again: its files stay as they are"
                problem = f"the host could not judge: {failure}"
                return Unavailable(problem, field="verifier", way_out=way_out)
            found = box.final
    orders.counts.verified += 1
    orders.counts.took("verify", monotonic() - began)
    box.untold = found
    return found


async def copy_in(
    orders: Orders, name: str, box: UsedBox, folder: str, files: tuple[CopiedFile, ...]
) -> MusterError | None:
    """Write files below a folder of the box, which has `copying` set until then."""
    try:
        await orders.backend.copy_in(name, folder, files)
    except InvalidInput as wrong:
        return wrong
    except Exception as failure:  # noqa: BLE001 - one box must not end the host
        return _copy_trouble(orders, name, failure)
    finally:
        box.copying = ""
    return None


async def copy_out(orders: Orders, name: str, box: UsedBox, path: str) -> bytes | MusterError:
    """A file or folder of the box as a tar; `copying` as with `copy_in`."""
    most = orders.config.copy_bytes_max
    try:
        return archives.write(await orders.backend.copy_out(name, path, most))
    except InvalidInput as wrong:
        return wrong
    except Exception as failure:  # noqa: BLE001 - one box must not end the host
        return _copy_trouble(orders, name, failure)
    finally:
        box.copying = ""


def _copy_trouble(orders: Orders, name: str, failure: Exception) -> MusterError:
    if name not in orders.boxes:
        return lost(ENDED, name)
    orders.counts.failures["copy"] += 1
    log("a copy of box %s failed", name, failure)
    return Unavailable(f"the host could not copy: {failure}", field="box", way_out="ask again")
