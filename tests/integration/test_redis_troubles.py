"""What a Redis server may suffer: an append lands once, and no two leaders share an epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest
from redis.asyncio import Redis

from muster.errors import ConfigError, Fenced, MusterError, Unavailable
from muster.leader import Leadership
from muster.memory import memory_problem, memory_share
from muster.registry import Registry
from muster.streams import RunStreams, StreamEntry, connect, next_epoch
from muster.supervise import server_log
from tests.integration import redis_own
from tests.integration.redis_own import OwnServer, Trouble

T = TypeVar("T")

# The trouble, and a word of what is said of it while it lasts ("" when it passes unnoticed).
TROUBLES = [
    pytest.param(redis_own.full, "maxmemory", id="full"),
    pytest.param(redis_own.away, "does not answer", id="away"),
    pytest.param(redis_own.loading, "loading", id="loading"),
    pytest.param(redis_own.replica, "primary", id="readonly"),
    pytest.param(redis_own.paused, "does not answer", id="paused"),
    pytest.param(redis_own.stopped, "does not answer", id="stopped"),
    pytest.param(redis_own.disk_full, "disk is full", id="disk-full"),
    pytest.param(redis_own.cut, "", id="cut"),
    pytest.param(redis_own.forgotten, "", id="scripts-forgotten"),
]


@pytest.fixture
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OwnServer]:
    # A short path: a Unix socket's may have 107 bytes.
    made = OwnServer(tmp_path_factory.mktemp("r"))
    await made.start()
    yield made
    await made.admin.aclose()
    made.kill()


@pytest.fixture
async def client(server: OwnServer) -> AsyncIterator[Redis]:
    async with connect(server.config) as made:
        yield made


class Insisting:
    """Repeats calls while Redis has trouble; `said` is what was told meanwhile."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.refused = asyncio.Event()

    async def on(self, call: Callable[[], Awaitable[T]]) -> T:
        async with asyncio.timeout(60):
            while True:
                try:
                    return await call()
                except Unavailable as error:
                    self.said.append(str(error))
                    self.refused.set()
                await asyncio.sleep(0.01)
        raise AssertionError("not reached")


def entry(dedupe: str) -> StreamEntry:
    return StreamEntry("events", "s", dedupe, dedupe.encode())


async def written(server: OwnServer) -> list[bytes]:
    return [fields[b"d"] for _, fields in await server.admin.xrange("m:{r}:events")]


@pytest.mark.parametrize(("trouble", "word"), TROUBLES)
async def test_an_append_repeated_through_trouble_lands_once(
    server: OwnServer, client: Redis, trouble: Trouble, word: str
) -> None:
    epoch = await next_epoch(client, "r", "router")
    streams = RunStreams(client, "r", role="router", epoch=epoch)
    await streams.append([entry("before")])
    insisting = Insisting()
    async with asyncio.TaskGroup() as tasks:
        async with trouble(server):
            lasting = tasks.create_task(
                insisting.on(lambda: streams.append([entry("during")], {"p": b"tokens"}))
            )
            if word:
                await insisting.refused.wait()
        await lasting
    assert word in " ".join(insisting.said)
    assert await insisting.on(lambda: streams.append([entry("during"), entry("after")])) == [
        False,
        True,
    ]
    assert await written(server) == [b"before", b"during", b"after"]
    assert await server.admin.get("p") == b"tokens"


@pytest.mark.parametrize("trouble", [pytest.param(p.values[0], id=p.id) for p in TROUBLES])
async def test_leaders_through_trouble_never_share_an_epoch(
    server: OwnServer, client: Redis, trouble: Trouble
) -> None:
    """Whoever led last may write, every former one is refused, and their epochs differ."""
    contest = Contest(client)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(contest.enter())
        await contest.led(1)
        tasks.create_task(contest.enter())
        async with trouble(server):
            await asyncio.sleep(6 * contest.ttl_s)  # the trouble itself: it outlasts a heartbeat
        await contest.settled(server)
        if len(contest.epochs) == 1:  # the trouble went by unnoticed: the next one comes now
            await server.admin.set("m:{r}:leader:router", "another", px=100)
            await contest.led(2)
        contest.over.set()
    assert len(contest.epochs) >= 2
    newest = int(await server.admin.get("m:{r}:epoch:router"))
    assert len(set(contest.epochs)) == len(contest.epochs)
    for epoch in contest.epochs:
        assert await contest.may_write(epoch) is (epoch == newest)


class Contest:
    """Two processes' tries at leading, with short times."""

    ttl_s = 0.1

    def __init__(self, client: Redis):
        self._client = client
        self.epochs: list[int] = []
        self.over = asyncio.Event()
        self._changed = asyncio.Event()

    async def enter(self) -> None:
        while not self.over.is_set():
            leadership = Leadership(self._client, "r", "router", beat_s=0.02, ttl_s=self.ttl_s)
            if not await leadership.stand_by(self.over):
                return
            try:
                async with leadership.lead() as epoch:
                    self.epochs.append(epoch)
                    self._changed.set()
                    await self.over.wait()
            except* (Fenced, Unavailable):
                await asyncio.sleep(0)

    async def led(self, epoch: int) -> None:
        """Wait until that epoch was taken."""
        async with asyncio.timeout(30):
            while epoch not in self.epochs:
                self._changed.clear()
                await self._changed.wait()

    async def settled(self, server: OwnServer) -> None:
        """Wait until the newest epoch of all is that of one who leads: its answer was not lost."""
        async with asyncio.timeout(30):
            while int(await server.admin.get("m:{r}:epoch:router")) not in self.epochs:
                self._changed.clear()
                await self._changed.wait()

    async def may_write(self, epoch: int) -> bool:
        streams = RunStreams(self._client, "r", role="router", epoch=epoch)
        try:
            await Insisting().on(lambda: streams.append([entry(f"of {epoch}")]))
        except Fenced:
            return False
        return True


async def test_a_full_server_takes_what_leads_to_its_relief(
    server: OwnServer, client: Redis
) -> None:
    """Groups are finished and retired, owners change, the fleet stays listed."""
    streams = RunStreams(client, "r")
    await streams.append([StreamEntry("events", "g:job-0", "opened", b"x")], {"p": b"x" * 1000})
    router = RunStreams(client, "r", role="router", epoch=await next_epoch(client, "r", "router"))
    registry = Registry(client, "r", beat_s=0.01)
    async with redis_own.full(server):
        with pytest.raises(Unavailable, match=r"takes no writes .* → .*maxmemory"):
            await router.append([entry("more work")])
        await router.mark_read({"fates": "1-0"})
        epoch = await next_epoch(client, "r", "readybank")
        bank = RunStreams(client, "r", role="readybank", epoch=epoch)
        assert await bank.append([StreamEntry("fates", "fates", "job-0", b"trained")]) == [True]
        totals = {"trained": 1}
        assert await bank.retire("job-0", job="job", index=0, totals=totals, delete=["p"])
        assert await bank.read_by("router") == {"fates": "1-0"}
        await bank.drop(["late"])
        async with registry.announce("sandbox", "s", "h:1"):
            assert [found.id for found in await registry.list("sandbox")] == ["s"]
    assert await server.admin.exists("p") == 0


async def test_the_high_water_mark_is_seen_before_the_server_is_full(
    server: OwnServer, client: Redis
) -> None:
    assert await memory_problem(client, server.config) == ""
    used = (await server.admin.info("memory"))["used_memory"]
    await server.admin.config_set("maxmemory", str(used * 2))
    assert 0.5 < await memory_share(client, server.config) < 1.0
    lower = server.config.model_copy(update={"high_water": 0.4})
    assert "redis.high_water" in await memory_problem(client, lower)


async def test_a_torn_end_is_dropped_told_and_written_again(
    server: OwnServer, client: Redis
) -> None:
    streams = RunStreams(client, "r")
    await server.admin.config_set("appendfsync", "always")
    await streams.append([entry("whole")])
    await streams.append([entry("torn")])
    server.kill()
    newest = server.files()[-1]
    newest.write_bytes(newest.read_bytes()[:-10])
    await server.start()
    assert server_log.remark(server.log, server.log_start) == server_log.TORN
    assert await written(server) == [b"whole"]
    assert await Insisting().on(lambda: streams.append([entry("torn")])) == [True]


async def test_damage_in_the_middle_is_refused_and_the_named_command_mends_it(
    server: OwnServer, client: Redis
) -> None:
    streams = RunStreams(client, "r")
    await server.admin.config_set("appendfsync", "always")
    await streams.append([entry("early")])
    whole = server.files()[-1].stat().st_size
    await streams.append([entry("late")])
    server.kill()
    newest = server.files()[-1]
    content = bytearray(newest.read_bytes())
    content[whole : whole + 20] = bytes(20)
    newest.write_bytes(content)
    server.launch()
    assert server.process.wait(30) != 0
    line = server.verdict()
    assert "damaged in the middle" in line
    command = line.partition("written after is lost): ")[2]
    pipe = asyncio.subprocess.PIPE
    mending = await asyncio.create_subprocess_exec("bash", "-c", command, stdin=pipe, stdout=pipe)
    said, _ = await mending.communicate(b"y\n")
    assert mending.returncode == 0, said
    await server.start()
    assert await written(server) == [b"early"]


async def test_under_always_a_full_disk_ends_the_server_and_says_so(
    server: OwnServer, client: Redis
) -> None:
    await server.admin.config_set("appendfsync", "always")
    streams = RunStreams(client, "r")
    await streams.append([entry("kept")])
    await server.admin.set("ballast", bytes(20_000))  # the limit is for its log too
    server.limit_files(server.files()[-1].stat().st_size)
    with pytest.raises(Unavailable):
        await streams.append([entry("not answered")])
    assert server.process.wait(30) != 0
    assert "free space on that disk" in server.verdict()
    await server.start()
    assert await Insisting().on(lambda: streams.append([entry("not answered")])) == [True]
    assert await written(server) == [b"kept", b"not answered"]


async def refusal(server: OwnServer) -> MusterError:
    with pytest.raises(MusterError) as caught:
        async with connect(server.config):
            pass
    return caught.value


async def test_connecting_refuses_what_would_lose_trajectories(server: OwnServer) -> None:
    await server.admin.config_set("appendfsync", "no")
    assert "appendfsync no" in (await refusal(server)).problem
    await server.admin.config_set("appendfsync", "everysec")
    await server.admin.config_set("maxmemory-policy", "volatile-lru")
    assert "evicts keys" in (await refusal(server)).problem
    await server.admin.config_set("maxmemory-policy", "noeviction")
    await server.admin.config_set("appendonly", "no")
    assert "no append-only file" in (await refusal(server)).problem


async def test_connecting_refuses_a_replica_but_reading_from_it_is_fine(server: OwnServer) -> None:
    async with redis_own.replica(server):
        error = await refusal(server)
        assert isinstance(error, ConfigError)
        assert "name its primary" in error.way_out
        async with connect(server.config, reading=True) as client:
            assert await RunStreams(client, "r").read_all("events") == []


async def test_a_server_that_denies_config_get_is_used(server: OwnServer) -> None:
    await server.admin.execute_command(
        "ACL", "SETUSER", "muster", "on", ">word", "~*", "&*", "+@all", "-config"
    )
    url = f"unix://muster:word@{server.socket}"
    config = server.config.model_copy(update={"url": url})
    async with connect(config) as client:
        assert await RunStreams(client, "r").append([entry("1")]) == [True]


async def test_a_server_that_loads_is_waited_for_and_then_judged(server: OwnServer) -> None:
    """While it loads it says that it keeps no append-only file."""
    async with redis_own.loading(server), connect(server.config) as client:
        assert await RunStreams(client, "r").append([entry("1")]) == [True]
