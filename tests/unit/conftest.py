"""What unit tests share: a run told as a story, and a real server for streams."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from redis.asyncio import Redis

from muster import codec
from muster.record import RunRecord, decode
from muster.streams import Received
from muster.supervise.plan import server_binary
from muster.types import EpisodeKey, EpisodeState, Outcome, OutcomeLabel, StateInterval, VersionSpan
from muster.v1 import events_pb2 as ev

PASSED = OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0)
FAILED = OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", 0.0)
LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")


class Story:
    """Writes the streams of a run, entry by entry, as the services would.

    Time goes on by one second with each interval of an episode; `owner` is the router's epoch.
    """

    def __init__(self, run: str = "r"):
        self.run, self.owner = run, 1
        self.messages: list[Received] = []
        self._numbers = count(1)

    def add(self, stream: str, message: Message) -> Received:
        entry = Received(stream, f"1000-{next(self._numbers)}", message.SerializeToString(), "")
        self.messages.append(entry)
        return entry

    def again(self, entry: Received) -> None:
        """The same entry a second time, under a new stream id."""
        again = Received(entry.stream, f"1000-{next(self._numbers)}", entry.data, "")
        self.messages.append(again)

    def drop(self, *entries: Received) -> None:
        for entry in entries:
            self.messages.remove(entry)

    def job(self, job: str = "job", *, groups: int = 2, size: int = 2, at: float = 0.0) -> None:
        self.add("jobs", ev.JobRecord(job=job, groups=groups, group_size=size, submitted_unix_s=at))

    def opened(self, group: str, *, size: int = 2, job: str = "job", task: str = "t") -> Received:
        opened = ev.GroupOpened(job=job, task=task, group_size=size, opened_unix_s=1.0)
        return self.add("events", self._event(self._key(group, 0, 0), 0, group_opened=opened))

    def turn(
        self, episode: tuple[str, int, int], turn: int, *, version: int = 0, at: float = 10.0
    ) -> Received:
        finished = ev.TurnFinished(
            turn=turn,
            prompt_tokens=20,
            sampled_tokens=5,
            cached_tokens=10,
            spans=codec.spans_to_pb([VersionSpan(version, 0, 5, version)]),
            replica="e0",
            intervals=codec.intervals_to_pb(
                [
                    StateInterval(EpisodeState.DECODE, at, at + 1),
                    StateInterval(EpisodeState.TOOL, at + 1, at + 2),
                ]
            ),
        )
        return self.add("events", self._event(self._key(*episode), turn, turn_finished=finished))

    def step(
        self,
        episode: tuple[str, int, int],
        turn: int,
        command: str = "true",
        *,
        at: float = 10.0,
        box: str = "b0",
        host: str = "h0",
        finished: bool = True,
        limit: str = "",
    ) -> list[Received]:
        """A turn with a command: 1 s of decoding, then its intent, then a second of the step."""
        key = self._key(*episode)
        decode = StateInterval(EpisodeState.DECODE, at, at + 1)
        tool = StateInterval(EpisodeState.TOOL, at + 1, at + 2)
        both: dict[str, Any] = {
            "turn": turn,
            "payload_key": f"m:{{{self.run}}}:p:{key.id}.{turn}",
            "prompt_tokens": 20,
            "sampled_tokens": 5,
            "spans": codec.spans_to_pb([VersionSpan(0, 0, 5, 0)]),
            "replica": "e0",
            "command": command,
            "host": host,
            "box": box,
        }
        intent = ev.TurnIntended(timeout_s=60, intervals=codec.intervals_to_pb([decode]), **both)
        told = [self.add("events", self._event(key, turn, turn_intended=intent))]
        if finished:
            intervals = codec.intervals_to_pb([decode, tool])
            done = ev.TurnFinished(intervals=intervals, limit=limit, wall_s=1.0, **both)
            told.append(self.add("events", self._event(key, turn, turn_finished=done)))
        return told

    def restored(
        self,
        episode: tuple[str, int, int],
        repair: int = 1,
        *,
        box: str = "b1",
        host: str = "h1",
        turns: int = 1,
        at: float = 12.0,
    ) -> Received:
        """Box b0 of h0 was lost and is rebuilt."""
        event = ev.BoxRestored(
            repair=repair,
            lost_host="h0",
            lost_box="b0",
            host=host,
            box=box,
            turns_replayed=turns,
            reason="host_lost",
            start_unix_s=at,
            end_unix_s=at + 1,
        )
        return self.add("events", self._event(self._key(*episode), turns, box_restored=event))

    def end(self, episode: tuple[str, int, int], turns: int, *, at: float = 20.0) -> Received:
        finished = ev.EpisodeFinished(
            turns=turns,
            host="h0",
            intervals=codec.intervals_to_pb([StateInterval(EpisodeState.VERIFY, at - 1, at)]),
            started_unix_s=at - 1 - 2 * turns,
            finished_unix_s=at,
        )
        return self.add(
            "events", self._event(self._key(*episode), turns, episode_finished=finished)
        )

    def label(self, episode: tuple[str, int, int], label: OutcomeLabel = FAILED) -> Received:
        return self.add("outcomes", codec.label_to_pb(self._key(*episode), label))

    def episode(
        self,
        group: str,
        sibling: int,
        attempt: int = 0,
        *,
        turns: int = 2,
        label: OutcomeLabel = FAILED,
        version: int = 0,
        at: float = 10.0,
    ) -> list[Received]:
        """A whole attempt that began at `at`: each turn takes 2 s, the verification 1 s."""
        key = (group, sibling, attempt)
        told = [self.turn(key, n, version=version, at=at + 2 * n) for n in range(turns)]
        return [*told, self.end(key, turns, at=at + 2 * turns + 1), self.label(key, label)]

    def group(self, group: str, *, size: int = 2, version: int = 0, at: float = 10.0) -> None:
        """A whole group of which the first sibling passed."""
        self.opened(group, size=size)
        for sibling in range(size):
            label = PASSED if sibling == 0 else FAILED
            self.episode(group, sibling, label=label, version=version, at=at)

    def batch(
        self,
        step: int,
        groups: dict[str, list[int]],
        *,
        trained: bool = False,
        asked: float = 10.0,
        complete: float = 15.0,
        version: int = 0,
    ) -> Received:
        stage = ev.BATCH_STAGE_TRAINED if trained else ev.BATCH_STAGE_FROZEN
        members = [ev.BatchMember(group=g, attempts=a) for g, a in groups.items()]
        batch = ev.BatchRecord(
            run=self.run,
            step=step,
            stage=stage,
            members=members,
            asked_unix_s=asked,
            complete_unix_s=complete,
            trainer_epoch=1,
            policy_version=version,
        )
        return self.add("batches", batch)

    def fate(self, group: str, step: int = 0, reason: str = "") -> Received:
        fate = ev.FATE_TRAINED if step else ev.FATE_FILTERED
        return self.add(
            "fates", ev.GroupFate(run=self.run, group=group, fate=fate, step=step, reason=reason)
        )

    def version(
        self,
        version: int,
        parent: int,
        *,
        step: int = 0,
        digest: str = "",
        publications: list[ev.PublicationReport] | None = None,
    ) -> list[Received]:
        """Durable, then published."""
        made = ev.StepReport(
            step=step, loss=0.5, mismatch_k1=0.01, mismatch_k3=0.002, mismatch_max_abs=0.4
        )
        durable = ev.PolicyVersionRecord(
            version=version,
            parent=parent,
            digest=digest or f"d{version}",
            stage=ev.VERSION_STAGE_DURABLE,
            step_kl=0.001,
            step=made if step else None,
        )
        published = ev.PolicyVersionRecord()
        published.CopyFrom(durable)
        published.stage = ev.VERSION_STAGE_PUBLISHED
        published.publications.extend(publications or [])
        return [self.add("versions", durable), self.add("versions", published)]

    def train(
        self,
        step: int,
        groups: dict[str, list[int]],
        *,
        asked: float = 10.0,
        complete: float = 15.0,
        publications: list[ev.PublicationReport] | None = None,
    ) -> None:
        """Freeze, train, fates, and the version step → step made from step - 1."""
        times = {"asked": asked, "complete": complete}
        self.batch(step, groups, version=step - 1, **times)
        self.version(step, step - 1, step=step, publications=publications)
        self.batch(step, groups, trained=True, version=step - 1, **times)
        for group in groups:
            self.fate(group, step)

    def record(self) -> RunRecord:
        return decode(self.run, self.messages)

    def _key(self, group: str, sibling: int, attempt: int) -> EpisodeKey:
        return EpisodeKey(self.run, group, sibling, attempt, self.owner)

    @staticmethod
    def _event(key: EpisodeKey, seq: int, **event: Message) -> ev.TrajectoryEvent:
        return ev.TrajectoryEvent(episode=codec.key_to_pb(key), seq=seq, **event)  # type: ignore[arg-type]


@pytest.fixture
def story() -> Story:
    """An empty run."""
    return Story()


@pytest.fixture
def good(story: Story) -> Story:
    """Two batches of one group of two siblings each, trained and published."""
    story.version(0, -1)
    story.job(groups=2, size=2)
    story.group("job-00000", at=10)
    story.train(1, {"job-00000": [0, 0]}, asked=5, complete=16)
    story.group("job-00001", version=1, at=30)
    story.train(2, {"job-00001": [0, 0]}, asked=29, complete=36)
    return story


@pytest.fixture(scope="session")
def valkey_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real server with an append-only file; its socket."""
    with running_server(tmp_path_factory.mktemp("valkey"), "--appendonly", "yes") as socket:
        yield socket


@pytest.fixture(scope="session")
def server_at() -> Callable[..., object]:
    """`with server_at(folder, *options) as socket`: a server of the test's own."""
    return running_server


class running_server:
    """A server in `folder` while the block runs; the value is the path of its socket."""

    def __init__(self, folder: Path, *options: str):
        self._folder, self._options = folder, options

    def __enter__(self) -> Path:
        socket = self._folder / "s"
        self._process = subprocess.Popen(
            [
                *(server_binary(), "--port", "0", "--unixsocket", str(socket)),
                *("--dir", str(self._folder), "--save", "", *self._options),
            ],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        assert self._process.stdout
        for line in self._process.stdout:
            if b"ready to accept" in line.lower():
                return socket
        raise RuntimeError("the server ended at once")

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
async def valkey(valkey_socket: Path) -> AsyncIterator[Redis]:
    """A client of the real server, which is empty."""
    client = Redis(unix_socket_path=str(valkey_socket))
    await client.flushall()
    yield client
    await client.aclose()
