"""Nothing is left: after exit 0, after Ctrl-C anywhere, after SIGKILL and the next Ctrl-C.

    python tests/e2e/leftovers.py [--fake-engine] [--only STORY] [--config FILE] [--json] [--here]

Each story takes a snapshot of the machine, runs `muster`, takes another; the difference must be
empty, a Ctrl-C must be obeyed within 10 s. What others on the machine start or leave must not
count, so it runs in process and mount namespaces of its own, with its own /tmp and /dev/shm
(`--here`: without). Exit status 1 when anything was left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e import snapshot

STOP_S = 10.0
STORY_S = 900.0
Line = dict[str, Any]


class Muster:
    """One `muster` process with --json; its lines, and the sending of signals."""

    def __init__(self, state: Path, *arguments: str, config: Path | None) -> None:
        command = [str(Path(sys.executable).with_name("muster")), *arguments, "--json"]
        command += ["--config", str(config)] if config else []
        environment = dict(os.environ, MUSTER_STATE_DIR=str(state))
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
        )

    def lines(self) -> Iterator[Line]:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            yield json.loads(text)

    def until(self, found: Callable[[Line], bool]) -> Line:
        """Read on until a line is as wanted."""
        for line in self.lines():
            if found(line):
                return line
        raise SystemExit(f"muster ended with status {self.ended()} before that")

    def interrupt(self) -> tuple[int, float]:
        """Ctrl-C: exit status, and seconds until it had ended."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        return self.ended(), time.monotonic() - begin

    def ended(self) -> int:
        """Read to the end; the exit status."""
        for _ in self.lines():
            pass
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait()

    def kill(self) -> None:
        """SIGKILL, to this process alone."""
        self.process.kill()
        self.ended()


class Story:
    """What a story needs to know, and what it found wrong."""

    def __init__(self, folder: Path, config: Path | None) -> None:
        self.state, self.config = folder / "state", config
        self.problems: list[str] = []
        self.facts: dict[str, float | int] = {}

    def muster(self, *arguments: str, demo_state: bool = False) -> Muster:
        # `muster demo` keeps its own folder inside the state folder.
        state = self.state / "demo" if demo_state else self.state
        return Muster(state, *arguments, config=self.config)

    def stopped(self, muster: Muster, status: int) -> None:
        """Ctrl-C now; it must end in time with that status."""
        found, seconds = muster.interrupt()
        self.facts["stop_s"] = round(seconds, 2)
        if found != status:
            self.problems.append(f"status {found} after Ctrl-C, not {status}")
        if seconds > STOP_S:
            self.problems.append(f"Ctrl-C took {seconds:.1f} s, more than {STOP_S:.0f} s")


def _job(line: Line) -> bool:
    return bool(line["event"] == "job")


def exit_0(story: Story) -> None:
    """A whole demo."""
    muster = story.muster("demo", "--batches", "1")
    if status := muster.ended():
        story.problems.append(f"the demo ended with status {status}")


def ctrl_c_while_starting(story: Story) -> None:
    """Ctrl-C while the engine loads."""
    muster = story.muster("demo")
    muster.until(lambda line: line.get("service") == "sandbox" and line["phase"] == "ready")
    story.stopped(muster, 130)


def ctrl_c_while_collecting(story: Story) -> None:
    """Ctrl-C while episodes run."""
    muster = story.muster("demo")
    muster.until(lambda line: _job(line) and line["turns"] >= 2)
    story.stopped(muster, 130)


def ctrl_c_while_training(story: Story) -> None:
    """Ctrl-C during an optimizer step."""
    muster = story.muster("demo")
    muster.until(lambda line: _job(line) and line["groups_complete"] >= 4)
    if not _wait_for_training(story.state / "demo"):
        story.problems.append("no training step was met")
    story.stopped(muster, 130)


def sigkill_then_up(story: Story) -> None:
    """SIGKILL of the supervisor while episodes run; the next `up` and its Ctrl-C."""
    muster = story.muster("demo")
    muster.until(lambda line: _job(line) and line["turns"] >= 2)
    muster.kill()
    successor = story.muster("up", demo_state=True)
    successor.until(lambda line: line["event"] == "line" and line["text"].startswith("ready"))
    story.stopped(successor, 0)


STORIES = {
    story.__name__: story
    for story in (
        exit_0,
        ctrl_c_while_starting,
        ctrl_c_while_collecting,
        ctrl_c_while_training,
        sigkill_then_up,
    )
}


def _wait_for_training(state: Path) -> bool:
    """True once the trainer says that it trains; asked through its own status call."""
    import asyncio

    from muster import rpc
    from muster.config import RedisConfig
    from muster.registry import Registry
    from muster.streams import connect
    from muster.supervise.state import runtime_dir
    from muster.v1 import trainer_pb2 as pb
    from muster.v1.trainer_pb2_grpc import TrainerServiceStub

    url = f"unix://{runtime_dir(state.resolve())}/valkey.sock"

    async def ask() -> None:
        async with connect(RedisConfig(url=url)) as redis:
            [*_, trainer] = await Registry(redis, "main").list("trainer")
        async with rpc.channel(trainer.address) as channel:
            stub: Any = TrainerServiceStub(channel)
            while True:
                status = await stub.GetTrainerStatus(pb.GetTrainerStatusRequest(), timeout=5)
                if status.phase == pb.TRAINER_PHASE_TRAINING:
                    return
                await asyncio.sleep(0.02)

    try:
        asyncio.run(asyncio.wait_for(ask(), 120))
    except TimeoutError:
        return False
    return True


@contextmanager
def _bounded() -> Iterator[None]:
    def over(number: int, frame: object) -> None:
        raise SystemExit(f"the story did not end within {STORY_S:.0f} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(int(STORY_S))
    try:
        yield
    finally:
        signal.alarm(0)


def tell(name: str, folder: Path, config: Path | None) -> dict[str, Any]:
    """Run one story; its problems, its facts and what was left."""
    story = Story(folder / name, config)
    before = snapshot.take()
    with _bounded():
        STORIES[name](story)
    after = snapshot.take()
    left = after.added(before)
    return {
        "story": name,
        "ok": not left and not story.problems,
        "problems": story.problems,
        "left": left,
        "looked_at": {kind: len(things) for kind, things in after.things.items()},
        **story.facts,
    }


def _alone() -> None:
    """Start again as the first process of fresh namespaces."""
    fresh = 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    namespaces = ("--fork", "--kill-child", "--pid", "--mount", "--mount-proc")
    again = [sys.executable, __file__, *sys.argv[1:], "--here"]
    os.execvp("unshare", ["unshare", *namespaces, "bash", "-c", fresh, "bash", *again])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(STORIES), action="append")
    parser.add_argument("--config", type=Path, help="TOML file for muster")
    parser.add_argument("--fake-engine", action="store_true", help="scripted engine: faster")
    parser.add_argument("--json", action="store_true", help="one JSON object a story")
    parser.add_argument("--here", action="store_true", help="no namespaces of its own")
    options = parser.parse_args()
    if not options.here:
        _alone()
    if options.fake_engine:
        os.environ["MUSTER_INFERENCE__ENGINE"] = "fake"
    failed = False
    with tempfile.TemporaryDirectory(prefix="leftovers-") as folder:
        for name in options.only or STORIES:
            found = tell(name, Path(folder), options.config)
            failed = failed or not found["ok"]
            sys.stdout.write(json.dumps(found) + "\n" if options.json else _for_people(found))
            sys.stdout.flush()
    return 1 if failed else 0


def _for_people(found: dict[str, Any]) -> str:
    stop = f", stopped in {found['stop_s']} s" if "stop_s" in found else ""
    lines = [f"{found['story']}: {'nothing left' if found['ok'] else 'FAILED'}{stop}"]
    lines += [f"  {problem}" for problem in found["problems"]]
    lines += [f"  left: {kind}: {item}" for kind, new in found["left"].items() for item in new]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
