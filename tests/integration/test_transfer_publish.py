"""One publication from a trainer to replicas over gRPC and gloo; the engines are fakes that really
receive and verify, so what is tested is everything but vLLM."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from muster import rpc
from muster.errors import Fenced, Unavailable
from muster.transfer import manifest as weights
from muster.transfer.active import ActiveRequests
from muster.transfer.group import GroupSpec
from muster.transfer.publisher import ReplicaPublication, TransferSettings, publish
from muster.transfer.snapshot import Snapshot
from muster.types import EpisodeKey, FinishReason, SamplingParams
from muster.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from services.inference.adapters.fake import FakeEngine, Script
from services.inference.adapters.receive import receive_and_verify
from services.inference.driver import ReplicaDriver
from services.inference.engine import Chunk, Finish, Sampling, UpdateStatus
from services.inference.replica import Bounds, Replica, State
from services.inference.server import InferenceServicer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
STATE = {"a": torch.arange(3000, dtype=torch.bfloat16), "b": torch.ones(5, 7)}
SETTINGS = TransferSettings(timeout_s=20.0, call_timeout_s=5.0)


class Fleet:
    """Replicas that serve gRPC in this process."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.drivers: dict[str, ReplicaDriver] = {}
        self.addresses: list[tuple[str, str]] = []

    async def publish(
        self,
        version: int,
        *,
        state: dict[str, torch.Tensor] = STATE,
        epoch: int = 1,
        elsewhere: int = 0,
        settings: TransferSettings = SETTINGS,
    ) -> dict[str, ReplicaPublication]:
        reports = await publish(
            Snapshot.take(state, version=version, parent=version - 1),
            run="main",
            trainer_epoch=epoch,
            replicas=self.addresses,
            settings=settings,
            serving=elsewhere,
        )
        return {report.replica: report for report in reports}

    def generate(self, name: str, tokens: int = 1) -> AsyncGenerator[Chunk | Finish, None]:
        request = Sampling("r", (1, 2, 3), SamplingParams(), tokens)
        return self.drivers[name].generate(EpisodeKey("main", "g", 0, 0, 1), request)

    def served(self) -> dict[str, tuple[State, int]]:
        return {n: (d.replica.state, d.replica.version) for n, d in self.drivers.items()}


@asynccontextmanager
async def fleet(stored_root: str = "", **scripts: Script) -> AsyncIterator[Fleet]:
    made = Fleet()
    receive = partial(receive_and_verify, stored_root=stored_root)
    async with AsyncExitStack() as stack:
        for name, script in scripts.items():
            engine = FakeEngine(script, receive=receive)
            replica = Replica("main", Bounds(requests_max=4, scores_max=2, tokens_max=2048))
            expected = {name: tuple(tensor.shape) for name, tensor in STATE.items()}
            driver = ReplicaDriver(replica, engine, receive_timeout_s=30.0, expected=expected)
            await stack.enter_async_context(driver)
            await driver.start(0)
            servicer = InferenceServicer(name, driver)
            services = [(add_InferenceServiceServicer_to_server, servicer)]
            server = await stack.enter_async_context(rpc.serve("127.0.0.1:0", services))
            made.engines[name], made.drivers[name] = engine, driver
            made.addresses.append((name, server.address))
        yield made


async def test_every_replica_serves_the_new_version() -> None:
    async with fleet(one=Script(), two=Script()) as world:
        reports = await world.publish(1)

        assert [r.error for r in reports.values()] == ["", ""]
        assert all(r.latency_s > 0 and r.receive_s > 0 for r in reports.values())
        assert world.served() == {"one": (State.SERVING, 1), "two": (State.SERVING, 1)}
        await world.publish(2)
        assert (await world.engines["one"].score((1, 2), 1.0)).version == 2


async def test_a_replica_that_cannot_be_reached_costs_only_itself() -> None:
    async with fleet(one=Script()) as world:
        world.addresses.append(("gone", "127.0.0.1:1"))

        reports = await world.publish(1)

        assert reports["one"].serving
        assert "prepare on gone" in reports["gone"].error
        assert world.served() == {"one": (State.SERVING, 1)}


async def test_a_rate_that_is_too_low_for_the_deadline_leaves_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.transfer.group.PACED_BUCKET_BYTES", 1000)
    async with fleet(one=Script()) as world:
        slow = replace(SETTINGS, bytes_per_s=10.0, timeout_s=1.0)  # minutes for these weights

        reports = await world.publish(77, settings=slow)

        assert not reports["one"].serving
        for sending in [t for t in threading.enumerate() if t.name == "send-77"]:
            sending.join(10.0)
            assert not sending.is_alive()


async def test_an_address_that_the_trainer_does_not_have_is_in_every_report() -> None:
    async with fleet(one=Script(), two=Script()) as world:
        reports = await world.publish(1, settings=replace(SETTINGS, host="192.0.2.1"))

        assert ["transfer.host" in r.error for r in reports.values()] == [True, True]
        assert world.served() == {"one": (State.SERVING, 0), "two": (State.SERVING, 0)}


@pytest.mark.parametrize("failing", ["prepare", "receive", "apply"])
async def test_a_replica_that_misses_what_another_serves_is_fenced_until_it_has_it(
    failing: str,
) -> None:
    async with fleet(one=Script(fail=frozenset({failing})), two=Script()) as world:
        reports = await world.publish(1)

        assert "asked to fail" in reports["one"].error or "fenced" in reports["one"].error
        assert reports["two"].serving
        assert world.served() == {"one": (State.FENCED, 0), "two": (State.SERVING, 1)}
        with pytest.raises(Unavailable, match="fenced"):
            await anext(world.generate("one"))

        world.engines["one"].rescript(Script())
        world.addresses.pop()
        again = await world.publish(1)  # as the trainer's periodic look does
        assert again["one"].serving
        assert world.served() == {"one": (State.SERVING, 1), "two": (State.SERVING, 1)}
        await anext(world.generate("one"))


@pytest.mark.parametrize("failing", ["prepare", "receive"])
async def test_what_nobody_took_changes_nothing(failing: str) -> None:
    script = Script(fail=frozenset({failing}))
    async with fleet(one=script, two=script) as world:
        await world.publish(1)

        assert world.served() == {"one": (State.SERVING, 0), "two": (State.SERVING, 0)}
        await anext(world.generate("one"))


async def test_a_failed_resend_of_what_others_serve_fences() -> None:
    async with fleet(one=Script(fail=frozenset({"receive"}))) as world:
        await world.publish(1, elsewhere=1)

        assert world.served() == {"one": (State.FENCED, 0)}


async def test_fencing_ends_what_runs() -> None:
    slow = Script(length=100_000, step_s=0.001, fail=frozenset({"receive"}))
    async with fleet(one=slow, two=Script()) as world:
        stream = world.generate("one", tokens=2000)
        await anext(stream)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.publish(1))
            finish = [item async for item in stream if isinstance(item, Finish)]

        assert finish[0].reason is FinishReason.ABORT
        assert [span.version for span in finish[0].spans] == [0]


async def test_a_trainer_that_lost_its_checkpoints_goes_back_to_the_base_model() -> None:
    async with fleet(one=Script()) as world:
        await world.publish(1, epoch=1)
        await world.publish(2, epoch=1)

        reports = await world.publish(0, epoch=2)

        assert reports["one"].error == ""
        assert world.served() == {"one": (State.SERVING, 0)}
        assert (await world.engines["one"].score((1, 2), 1.0)).version == 0


async def test_a_label_that_stays_behind_fences_the_replica() -> None:
    async with fleet(one=Script(stale=True)) as world:
        reports = await world.publish(1)

        assert "fenced" in reports["one"].error
        assert world.served() == {"one": (State.FENCED, 0)}


async def test_a_fenced_replica_is_whole_after_the_next_publication() -> None:
    async with fleet(one=Script(fail=frozenset({"apply"}))) as world:
        await world.publish(1)
        world.engines["one"].rescript(Script())

        reports = await world.publish(2)

        assert reports["one"].serving
        assert world.served() == {"one": (State.SERVING, 2)}


async def test_half_a_model_is_refused_before_anything_is_sent() -> None:
    async with fleet(one=Script()) as world:
        reports = await world.publish(1, state={"a": STATE["a"]})

        assert "1 tensors of the model are missing" in reports["one"].error
        assert world.served() == {"one": (State.SERVING, 0)}


async def test_a_replaced_trainer_hears_that_it_is() -> None:
    async with fleet(one=Script()) as world:
        await world.publish(1, epoch=2)

        with pytest.raises(Fenced, match="trainer epoch 2"):
            await world.publish(2, epoch=1)

        assert world.served() == {"one": (State.SERVING, 1)}


async def test_a_replica_that_never_joins_is_given_up_in_time() -> None:
    def absent(manifest: weights.Manifest, group: GroupSpec) -> str:
        return "never joined"

    async with fleet(one=Script()) as world:
        world.engines["one"]._receive = absent
        reports = await world.publish(1)

    assert "never joined" in reports["one"].error


async def test_a_replica_that_forgot_version_0_is_not_waited_for() -> None:
    """An idle replica names version 0 too: it stands for none."""
    async with fleet(one=Script()) as world:
        await world.publish(1)
        engine = world.engines["one"]

        def forget(manifest: weights.Manifest, group: GroupSpec) -> str:
            receive_and_verify(manifest, group)
            engine._update = UpdateStatus()
            return ""

        engine._receive = forget
        reports = await world.publish(0)

    assert "no longer receiving version 0" in reports["one"].error


async def test_a_running_request_goes_on_under_the_new_version() -> None:
    async with fleet(one=Script(length=100_000, step_s=0.001)) as world:
        stream = world.generate("one", tokens=1500)
        await anext(stream)

        async with asyncio.TaskGroup() as tasks:
            publication = tasks.create_task(world.publish(1))
            finish = [item async for item in stream if isinstance(item, Finish)]

        assert [span.version for span in finish[0].spans] == [0, 1]
        assert publication.result()["one"].requests_recomputed == 1


def stored(root: Path) -> TransferSettings:
    return replace(SETTINGS, backend="stored", folder=str(root))


async def test_a_version_reaches_replicas_through_a_folder(tmp_path: Path) -> None:
    async with fleet(str(tmp_path), one=Script(), two=Script()) as world:
        for version in (1, 2, 3):
            reports = await world.publish(version, settings=stored(tmp_path))
            assert [r.error for r in reports.values()] == ["", ""]

        assert world.served() == {"one": (State.SERVING, 3), "two": (State.SERVING, 3)}
    found = sorted(os.listdir(tmp_path / "main"))
    assert [name[:14] for name in found] == ["version-000002", "version-000003"]


async def test_another_run_in_the_same_folder_costs_nobody_a_version(tmp_path: Path) -> None:
    """It has versions of higher numbers there, as a run has that began before."""
    for version in (7, 8):
        await publish(
            Snapshot.take(STATE, version=version, parent=version - 1),
            run="other",
            trainer_epoch=1,
            replicas=[("gone", "127.0.0.1:1")],
            settings=stored(tmp_path),
        )
    async with fleet(str(tmp_path), one=Script()) as world:
        reports = await world.publish(1, settings=stored(tmp_path))
    assert reports["one"].error == ""
    assert len(os.listdir(tmp_path / "other")) == 2


async def test_a_version_that_cannot_be_stored_is_missed_by_all_and_said_so(tmp_path: Path) -> None:
    (tmp_path / "main").write_text("a file where the folder has to be")
    async with fleet(str(tmp_path), one=Script(), two=Script()) as world:
        reports = await world.publish(1, settings=stored(tmp_path))
        assert {name: "cannot be stored" in r.error for name, r in reports.items()} == {
            "one": True,
            "two": True,
        }
        assert world.served() == {"one": (State.SERVING, 0), "two": (State.SERVING, 0)}


async def test_a_disk_that_hangs_costs_the_publication_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake = threading.Event()

    def hangs(snapshot: Snapshot, root: Path) -> Path:
        awake.wait()
        return root

    monkeypatch.setattr("muster.transfer.stored.save", hangs)
    async with fleet(str(tmp_path), one=Script()) as world:
        settings = replace(stored(tmp_path), timeout_s=0.2)
        async with asyncio.timeout(20):
            reports = await world.publish(1, elsewhere=1, settings=settings)
        assert "version 1 was not stored within" in reports["one"].error
        assert world.served() == {"one": (State.FENCED, 0)}  # another one serves the version
    awake.set()


async def test_a_replica_that_comes_late_counts_those_that_serve_the_version() -> None:
    async with fleet(one=Script(), two=Script(fail=frozenset({"receive"}))) as world:
        late = replace(SETTINGS, quorum=0.6)
        assert not (await world.publish(1, settings=late))["one"].serving
        assert (await world.publish(1, elsewhere=1, settings=late))["one"].serving


async def test_a_replica_that_reads_no_folders_says_so(tmp_path: Path) -> None:
    async with fleet(one=Script()) as world:
        reports = await world.publish(1, settings=stored(tmp_path))

    assert "reads no stored versions" in reports["one"].error


async def test_with_a_quorum_nobody_serves_what_too_few_hold() -> None:
    """Mixed versions or none: all go on with what they serve."""
    async with fleet(one=Script(), two=Script(fail=frozenset({"receive"}))) as world:
        reports = await world.publish(1, settings=replace(SETTINGS, quorum=1.0))

        assert "1 replicas hold the version, 2 are needed" in reports["one"].error
        assert world.served() == {"one": (State.SERVING, 0), "two": (State.SERVING, 0)}
        await world.publish(1, settings=replace(SETTINGS, quorum=0.5))
        assert world.served() == {"one": (State.SERVING, 1), "two": (State.FENCED, 0)}


@pytest.mark.parametrize("active", ActiveRequests)
async def test_a_publication_says_what_becomes_of_running_requests(active: ActiveRequests) -> None:
    async with fleet(one=Script(length=100_000, step_s=0.001)) as world:
        stream = world.generate("one", tokens=1500)
        await anext(stream)

        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(world.publish(1, settings=replace(SETTINGS, active=active)))
            finish = [item async for item in stream if isinstance(item, Finish)]

    (report,) = work.result().values()
    counts = {
        ActiveRequests.FINISH: report.requests_finished,
        ActiveRequests.ABORT: report.requests_aborted,
        ActiveRequests.KEEP: report.requests_kept,
        ActiveRequests.RECOMPUTE: report.requests_recomputed,
    }
    assert counts == {other: int(other is active) for other in ActiveRequests}
    assert (finish[0].reason is FinishReason.ABORT) == (active is ActiveRequests.ABORT)
