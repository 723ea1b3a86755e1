"""`muster submit`, `muster watch` and `muster cancel`."""

from __future__ import annotations

import asyncio
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from muster.cli.screen import emit, screen, summary
from muster.cli.settings import read_config
from muster.client import JobState, MusterClient, Progress
from muster.errors import InvalidInput
from muster.supervise.state import router_address
from muster.types import JobPolicy, SamplingParams


def submit(
    path: Path,
    *,
    groups: int,
    group_size: int,
    temperature: float,
    wait: bool,
    router: str,
    as_json: bool,
    split: str = "train",
    instances: int | None = None,
    policy: Sequence[str] = (),
) -> int:
    """Submit; with `wait`, follow to the end. 0, or 1 when the job was cancelled."""

    async def send() -> str:
        async with _client(router) as client:
            return await client.submit(
                path,
                groups=groups,
                group_size=group_size,
                sampling=SamplingParams(temperature=temperature),
                split=split,
                instances=instances,
                policy=wanted,
            )

    wanted = job_policy(policy)
    job = asyncio.run(send())
    if as_json:
        emit("submitted", {"job": job})
    elif wait:
        print(f"submitted {job}", flush=True)
    else:
        print(job)
    return watch(job, router=router, as_json=as_json) if wait else 0


def job_policy(settings: Sequence[str]) -> JobPolicy:
    """`key=value` settings as a policy; InvalidInput names what is wrong. Ranges: the router's."""
    raw: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        known = JobPolicy.__struct_fields__
        if not equals or key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            way_out = f"write {near[0] if near else known[0]}=VALUE; known are {', '.join(known)}"
            raise InvalidInput("not a policy", field="--policy", value=setting, way_out=way_out)
        raw[key] = value
    try:
        return msgspec.convert(raw, JobPolicy, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(
            f"not a value of that policy: {error}",
            field="--policy",
            value=", ".join(settings),
            way_out="repairs_max and valid_min are counts, infra_ceiling is a share from 0 to 1, "
            "zero_variance is train or filter",
        ) from None


def watch(job: str, *, router: str, as_json: bool) -> int:
    """Follow to the end; 0 when the job is done, 1 when it was cancelled."""
    with screen(as_json) as shown:

        async def follow() -> Progress:
            async with _client(router) as client:
                last: Progress | None = None
                async for last in client.watch(job):
                    shown.job(last)
                assert last is not None, "a watch ends with a state or raises"
                return last

        last = asyncio.run(follow())
    if not as_json:
        print(summary(last))
    return 0 if last.state is JobState.DONE else 1


def cancel(job: str, *, router: str, as_json: bool) -> int:
    """Stop a job's episodes and give up its open groups; 0 when it is cancelled or was done."""

    async def send() -> Progress:
        async with _client(router) as client:
            return await client.cancel(job)

    last = asyncio.run(send())
    if as_json:
        emit("cancelled", {"job": job, "state": str(last.state)})
    else:
        print(summary(last))
    return 0


def _client(router: str) -> MusterClient:
    """Without an address, the router of this machine's `muster up`, wherever it listens by now."""
    if router:
        return MusterClient(router, tell=_tell)
    state_dir = read_config(None).state_dir
    return MusterClient(find=lambda: router_address(state_dir), tell=_tell)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
