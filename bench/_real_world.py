"""The real services of bench.collection_real, one arm at a time.

Owns: the processes (a durable server, the engines, a native sandbox host, the ready bank, the
router with planned replies), the stand-in of a trainer.
Promise: whatever way a run ends, its processes are asked to stop in order and killed if they do
not; a process that ends early ends the run with its last words. Does not cover: their
configuration (_real_setup.py), plans (_real_plan.py), figures (collection_real.py).

The trainer's stand-in leases each batch, tells its step as published under the same weights, and
acknowledges it: training takes no time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from redis.asyncio import Redis

from bench import _bank_world as bank
from bench._real_plan import REPLICAS
from bench._real_router import BOOK, written
from bench._real_setup import Setup, configured, write_tasks
from muster import rpc
from muster.client import MusterClient
from muster.clock import monotonic
from muster.entries import RunRecord
from muster.errors import Unavailable
from muster.record import read_record
from muster.registry import Registry
from muster.streams import RunStreams, StreamEntry, next_epoch
from muster.tasks import end
from muster.types import SamplingParams, Value
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from muster.v1.readybank_pb2_grpc import ReadyBankServiceStub

ROOT = Path(__file__).parents[1]
START_S, STOP_S, BATCH_S = 300.0, 25.0, 7200.0
_POLL_S, _TELL_S = 0.5, 30.0
LONGER = 1.3  # times its time is the most that a run takes that is to end by the clock
_LAST_WORDS = 1500


class Ran(Value, frozen=True):
    """What a run gave. cuts_s: from the submission to each batch."""

    cuts_s: tuple[float, ...]
    record: RunRecord


async def run(asked: Setup, folder: Path, told: Callable[[str], None]) -> Ran:
    """One arm from nothing. Raises Unavailable when a process ends before its time."""
    config = configured(asked, folder)
    tasks = write_tasks(folder / "tasks", asked)
    async with bank.server(folder, "everysec") as (redis, _):
        with ExitStack() as stack:
            processes = _started(stack, asked, folder, config)
            found = await _announced(redis, processes)
            told(f"{folder.name}: all services are there")
            trainer = await Trainer.registered(redis, found["readybank"], asked)
            try:
                begin = await _collected(asked, found["router"], tasks, trainer, processes, told)
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            record = await read_record(redis, bank.RUN, folder / "state" / "history" / bank.RUN)
    return Ran(tuple(cut - begin for cut in trainer.cuts), record)


async def _collected(
    asked: Setup,
    router: str,
    tasks: list[Path],
    trainer: Trainer,
    processes: list[Process],
    told: Callable[[str], None],
) -> float:
    """Submit, and train all batches, while the processes are there; when it was submitted."""
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watched(processes, trainer, told))
        try:
            async with MusterClient(router) as client:
                begin = monotonic()
                await client.submit(
                    tasks,
                    groups=asked.groups,
                    group_size=asked.book.regime.group_size,
                    sampling=SamplingParams(seed=asked.book.seed),
                )
                await trained(trainer, asked)
        finally:
            await end(watch)
    return begin


class Batches(Protocol):
    """Who takes them."""

    async def train(self, batches: int) -> None: ...

    async def recorded(self) -> int: ...


async def trained(trainer: Batches, asked: Setup) -> None:
    """All batches, or those of its time, which is longer when too little was recorded in it."""
    if not asked.for_s:
        await trainer.train(asked.batches)
        return
    async with asyncio.TaskGroup() as group:
        training, began = group.create_task(trainer.train(asked.batches)), monotonic()
        while not training.done() and monotonic() - began < LONGER * asked.for_s:
            if monotonic() - began >= asked.for_s and await trainer.recorded() >= asked.entries:
                break
            await asyncio.sleep(min(_POLL_S, asked.for_s))
        await end(training)


class Trainer:
    """Stands for one: takes each batch at once. cuts: when, seconds of monotonic()."""

    def __init__(self, redis: Redis, epoch: int, address: str, groups: int):
        self._redis, self._epoch, self._address, self._groups = redis, epoch, address, groups
        self._streams = RunStreams(redis, bank.RUN, role="trainer", epoch=epoch)
        self.cuts: list[float] = []

    @classmethod
    async def registered(cls, redis: Redis, address: str, asked: Setup) -> Trainer:
        """In charge of the run."""
        epoch = await next_epoch(redis, bank.RUN, "trainer")
        async with rpc.channel(address) as channel:
            await bank.register(channel, epoch)
        return cls(redis, epoch, address, asked.book.regime.groups)

    async def recorded(self) -> int:
        """Entries of the events stream."""
        return int(await self._redis.xlen(self._streams.key("events")))

    async def train(self, batches: int) -> None:
        """Lease, publish and acknowledge so many."""
        async with rpc.channel(self._address) as channel:
            stub = ReadyBankServiceStub(channel)
            for step in range(1, batches + 1):
                lease = rb.LeaseBatchRequest(
                    run=bank.RUN, trainer_epoch=self._epoch, step=step, groups=self._groups
                )
                call: Any = stub.LeaseBatch(lease, timeout=BATCH_S)
                try:
                    async for _ in call:
                        pass
                finally:
                    call.cancel()
                self.cuts.append(monotonic())
                await self._streams.append([_published(step)])
                done = rb.AcknowledgeBatchRequest(
                    run=bank.RUN, trainer_epoch=self._epoch, step=step, oldest_kept_step=1
                )
                await stub.AcknowledgeBatch(done, timeout=bank.DEADLINE_S)


def _published(step: int) -> StreamEntry:
    """The same weights, after a further step."""
    message = ev.PolicyVersionRecord(
        version=0, parent=-1, stage=ev.VERSION_STAGE_PUBLISHED, step=ev.StepReport(step=step)
    )
    return StreamEntry("versions", "versions", f"step {step}", message.SerializeToString())


# -- processes -----------------------------------------------------------------------------


class Process(Value, frozen=True):
    """One that was started, and where its output goes."""

    name: str
    running: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise Unavailable when it has ended."""
        if self.running.poll() is not None:
            words = self.log.read_text("utf-8", "replace")[-_LAST_WORDS:]
            raise Unavailable(
                f"{self.name} of the benchmark has ended: {words}",
                way_out="look at its last words; --keep DIR keeps the logs",
            )


def _started(stack: ExitStack, asked: Setup, folder: Path, config: Path) -> list[Process]:
    book = folder / "book.json"
    book.write_bytes(written(asked.book))
    modules = {f"engine-{n}": "services.inference" for n in range(REPLICAS)}
    modules |= {"sandbox": "services.sandbox", "readybank": "services.readybank"}
    modules["router"] = "bench._real_router"  # last, so first to be ended
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")}
    environ |= {BOOK: str(book), "OMP_NUM_THREADS": "1"}
    found = []
    for name, module in modules.items():
        log = folder / f"{name}.log"
        command = [sys.executable, "-m", module, "--config", str(config)]
        running = stack.enter_context(_ended(command, log, environ))
        found.append(Process(name, running, log))
    return found


@contextmanager
def _ended(
    command: list[str], log: Path, environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """In a process group of its own; asked to stop when the block is left, then killed with it."""
    with log.open("wb") as out:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=dict(environ),
            cwd=ROOT,
            process_group=0,
        )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.terminate()
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


async def _announced(redis: Redis, processes: list[Process]) -> dict[str, str]:
    """An address of each kind, once all are there."""
    wanted = {"inference": REPLICAS, "sandbox": 1, "readybank": 1, "router": 1}
    registry, began = Registry(redis, bank.RUN), monotonic()
    while True:
        found = {kind: await registry.list(kind) for kind in wanted}
        if all(len(found[kind]) >= count for kind, count in wanted.items()):
            return {kind: entries[-1].address for kind, entries in found.items()}
        for process in processes:
            process.check()
        if monotonic() - began > START_S:
            missing = [kind for kind, count in wanted.items() if len(found[kind]) < count]
            raise Unavailable(f"not there within {START_S:g} s: {', '.join(missing)}")
        await asyncio.sleep(_POLL_S)


async def _watched(processes: list[Process], trainer: Trainer, told: Callable[[str], None]) -> None:
    """Until cancelled; tells how far it is. Raises Unavailable when a process ends."""
    began = last = monotonic()
    while True:
        for process in processes:
            process.check()
        await asyncio.sleep(_POLL_S)
        if monotonic() - last >= _TELL_S:
            last = monotonic()
            entries = await trainer.recorded()
            told(f"  {last - began:.0f} s: {len(trainer.cuts)} batches, {entries} turns and ends")
