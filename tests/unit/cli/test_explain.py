"""`muster explain`: from a batch that is late to the command that hangs, in two commands."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner, Result

from muster.cli.ask import ask
from muster.cli.main import app
from muster.codec import waiting_to_pb
from muster.errors import InvalidInput, NotFound
from muster.explained import Answer, explained, lines
from muster.registry import Registry
from muster.rpc import serve
from muster.run_index import RunIndex
from muster.streams import RunStreams, StreamEntry
from muster.subject import Kind, Subject, subject
from muster.types import Outcome, OutcomeLabel, Waiting
from muster.v1 import router_pb2 as ro
from muster.v1.router_pb2_grpc import RouterServiceServicer, add_RouterServiceServicer_to_server
from muster.view import fitted

Story = Any
G0, G1 = "job-00000", "job-00001"
SILENT = {k: Answer(k, (), "not running") for k in ("router", "readybank", "trainer")}
LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")


@pytest.fixture
def hung(story: Story) -> Story:
    """Group 0 is complete; in group 1 sibling 1 runs `sleep 600` in its turn 2."""
    story.job(groups=2)
    story.group(G0)
    story.opened(G1)
    story.episode(G1, 0)
    for turn in range(2):
        story.step((G1, 1, 0), turn, "ls")
    story.step((G1, 1, 0), 2, "sleep 600", finished=False)
    return story


def told(story: Story, *words: str, answers: dict[str, Answer] = SILENT) -> str:
    index = RunIndex(story.record())
    found = explained(
        index, subject(words, index), answers, 40.0, options=" --state-dir x", logs="/s/logs"
    )
    return "\n".join(lines(found))


def next_of(text: str) -> str:
    return text.rpartition("next: ")[2]


def test_a_hung_step_is_found_in_two_commands_from_the_streams_alone(hung: Story) -> None:
    first = told(hung)
    assert "batch 1: collecting" in first
    assert f"{G1}: 1 of 2 siblings ended" in first
    assert next_of(first) == f"muster explain {G1}.1.0 --state-dir x"
    second = told(hung, f"{G1}.1.0")
    assert "step of turn 2 runs: sleep 600" in second
    assert "(39.0 s)" in second  # the entry was written at 1.0
    assert "its limit of 60 s ends it at" in second


def test_a_group_leads_to_its_sibling_and_a_sibling_is_its_newest_attempt(hung: Story) -> None:
    assert next_of(told(hung, G1)) == f"muster explain {G1}.1.0 --state-dir x"
    assert told(hung, f"{G1}.1") == told(hung, f"{G1}.1.0")


def test_one_sentence_comes_first_and_says_who_has_to_move(hung: Story) -> None:
    for words in ((), (G1,), (f"{G1}.1.0",), ("job",)):
        headline = told(hung, *words).splitlines()[1]
        assert headline.startswith("in short: ")
        assert "step of turn 2 runs: sleep 600" in headline
        assert ", for 39.0 s; " in headline
        assert headline.endswith("has to move: sandbox host h0")


def test_a_running_step_leads_to_its_job_and_no_log(hung: Story) -> None:
    """It ends at its limit; watch asks the router, which the folder finds, and knows no run."""
    index = RunIndex(hung.record())
    asked = subject((f"{G1}.1.0",), index)
    found = explained(index, asked, SILENT, 40.0, options=" --run r --config c", folder=" -c c")
    assert found.next_command == "muster watch job -c c"


def test_a_complete_group_waits_for_those_that_are_open(hung: Story) -> None:
    text = told(hung, G0)
    assert f"waits for a batch, which waits for groups that are open: {G1}" in text
    assert next_of(text) == f"muster explain {G1} --state-dir x"


def test_a_batch_whose_groups_nobody_has_submitted_waits_for_a_client(good: Story) -> None:
    """As many groups as the batch before took: the trainer; fewer: whoever submits."""
    good.job("more", groups=1)
    good.opened("more-00000", job="more")
    good.episode("more-00000", 0)
    good.episode("more-00000", 1)
    assert "has to move: the trainer" in told(good, "batch")
    good.batch(3, {G0: [0, 0], G1: [0, 0]}, trained=True)
    text = told(good, "batch")
    assert "more groups: 1 of 2 are complete, and no other is open" in text
    assert "has to move: whoever submits jobs" in text
    assert next_of(text).startswith("muster submit")


def test_long_lines_are_broken_on_a_terminal_alone() -> None:
    long = "  job-00001: " + "waits " * 20
    parts = fitted([long, "next: " + "x" * 80], 60)
    assert max(map(len, parts[:-1])) <= 60
    assert parts[1].startswith("      waits")
    assert parts[-1] == "next: " + "x" * 80
    assert fitted([long]) == [long]  # no terminal here


def test_services_that_are_silent_are_named(hung: Story) -> None:
    text = told(hung)
    for name in ("router", "ready bank", "trainer"):
        assert f"the {name} does not answer: not running" in text


def test_what_a_service_says_counts_more_than_the_streams(hung: Story) -> None:
    line = Waiting(f"{G1}.1.0", "turn 2: runs `sleep 600`", "the end", 2.0, "h0", "tail x")
    answers = SILENT | {"router": Answer("router", (line,))}
    text = told(hung, f"{G1}.1.0", answers=answers)
    assert "the router says:" in text
    assert "the streams say:" not in text
    assert "waits for the end; since" in text
    assert "has to move: h0" in text
    assert next_of(text) == "tail x"


def test_a_live_run_leads_to_the_sibling_that_stands(hung: Story) -> None:
    batch = Waiting("batch 1", "collecting", "1 more groups", 1.0, "router", "muster explain")
    group = Waiting(G1, "open", "sibling 1", 1.0, "router", f"muster explain {G1}")
    sibling = Waiting(f"{G1}.1.0", "runs", "the end", 1.0, "h0", "tail x")
    answers = {
        "trainer": Answer("trainer", (Waiting("trainer", "waiting", "the next batch"),)),
        "readybank": Answer("readybank", (batch, group)),
        "router": Answer("router", (group, sibling)),
    }
    text = told(hung, answers=answers)
    assert next_of(text) == f"muster explain {G1}.1.0 --state-dir x"
    assert text.index("the trainer says") < text.index("the ready bank says")


ENDS = [
    ("trained", lambda s: s.train(1, {G0: [0, 0]}), G0, "trained in batch 1"),
    ("filtered", lambda s: s.fate(G0, reason="zero_variance"), G0, "filtered: zero_variance"),
    ("leased", lambda s: s.batch(1, {G0: [0, 0]}), G0, "in batch 1"),
    ("complete", lambda s: None, G0, "waits for a batch"),
    ("batch", lambda s: s.train(1, {G0: [0, 0]}), "1", "trained on 1 groups, made version 1"),
    ("label", lambda s: None, f"{G0}.1", "ended: model_failure (not_passed)"),
    ("repair", lambda s: s.episode(G1, 1, label=LOST), G1, f"{G1}.1.1: nothing recorded yet"),
]


@pytest.mark.parametrize(("name", "more", "what", "says"), ENDS, ids=[e[0] for e in ENDS])
def test_what_stands_or_has_ended_is_named(
    story: Story, name: str, more: Any, what: str, says: str
) -> None:
    story.job(groups=2)
    story.group(G0)
    story.opened(G1)
    more(story)
    assert says in told(story, what)


def test_an_empty_run_says_whose_move_it_is(story: Story) -> None:
    assert "no job was submitted" in told(story)
    assert next_of(told(story)).startswith("muster submit")


def test_a_trainer_that_is_at_work_leads_to_its_log(story: Story) -> None:
    story.job(groups=1)
    line = Waiting("trainer", "publishing", "e0", 0.0, "trainer", "tail -n 20 logs/trainer.log")
    batch = Waiting("batch 2", "not asked for", "the trainer", 0.0, "trainer", "muster report")
    answers = {
        "trainer": Answer("trainer", (line,)),
        "readybank": Answer("readybank", (batch,)),
        "router": Answer("router", (Waiting("job", "running", "the trainer", 0.0, "r", "x"),)),
    }
    assert next_of(told(story, answers=answers)) == "tail -n 20 /s/logs/trainer.log"


def test_a_run_without_work_leads_to_the_next_submission(good: Story) -> None:
    waits = Waiting(
        "trainer", "waiting", "the next batch", 0.0, "readybank", "muster explain batch"
    )
    batch = Waiting("batch 3", "collecting", "2 groups", 1.0, "router", "muster explain")
    ended = Waiting("r", "1 job ended", owner="client", next_command="muster submit tasks/")
    answers = {
        "trainer": Answer("trainer", (waits,)),
        "readybank": Answer("readybank", (batch,)),
        "router": Answer("router", (ended,)),
    }
    assert next_of(told(good, answers=answers)) == "muster submit tasks/"


def test_texts_of_boxes_are_cleaned(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.step((G0, 0, 0), 0, "\x1b[2J\u202e\nAPI_KEY=abcdefghij", finished=False)
    text = told(story, f"{G0}.0")
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "abcdefghij" not in text


WORDS = [
    ((), Subject(Kind.RUN, "r")),
    (("r",), Subject(Kind.RUN, "r")),
    (("batch",), Subject(Kind.BATCH, "3")),
    (("batch", "2"), Subject(Kind.BATCH, "2")),
    (("batch 2",), Subject(Kind.BATCH, "2")),
    (("2",), Subject(Kind.BATCH, "2")),
    (("job",), Subject(Kind.JOB, "job")),
    ((G0,), Subject(Kind.GROUP, G0)),
    ((f"{G0}.1",), Subject(Kind.EPISODE, f"{G0}.1.0")),
]


@pytest.mark.parametrize(("words", "meant"), WORDS)
def test_what_a_person_means(good: Story, words: tuple[str, ...], meant: Subject) -> None:
    assert subject(words, RunIndex(good.record())) == meant


WRONG = [("batch", "9"), ("9",), ("nobody",), (f"{G0}.7",), (f"{G0}.x",), ("²",), (f"{G0}.²",)]
WRONG += [(f"{G0}.1.7",), (f"{G0}.1.1",)]  # no attempt follows a valid outcome


@pytest.mark.parametrize("words", WRONG)
def test_what_is_not_there_is_answered_with_what_is(good: Story, words: tuple[str, ...]) -> None:
    with pytest.raises(NotFound) as caught:
        subject(words, RunIndex(good.record()))
    assert any(known in caught.value.way_out for known in (G0, "batches so far: 2"))


def test_the_attempt_after_a_lost_one_may_run_before_anything_is_recorded(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, label=LOST)
    index = RunIndex(story.record())
    assert subject((f"{G0}.0.1",), index).id == f"{G0}.0.1"
    with pytest.raises(NotFound, match=r"newest is job-00000\.0\.0"):
        subject((f"{G0}.0.2",), index)


def test_two_things_at_once_are_refused(good: Story) -> None:
    with pytest.raises(InvalidInput):
        subject((G0, G1), RunIndex(good.record()))


def test_a_job_is_explained_from_its_open_groups(hung: Story) -> None:
    text = told(hung, "job")
    assert "job: 2 groups on record, 0 of them with a fate" in text
    assert f"{G1}: 1 of 2 siblings ended" in text
    assert next_of(text).startswith("muster explain ")


def test_every_command_that_is_recommended_exists() -> None:
    """Whoever explains names the command to run next."""
    root = Path(__file__).parents[3]
    files = [*root.glob("services/*/explain.py"), *root.glob("muster/explain*.py")]
    files.append(root / "muster/cli/ask.py")
    named = {word for file in files for word in re.findall(r'"muster ([a-z]+)', file.read_text())}
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert named <= commands
    assert "explain" in named


class Router(RouterServiceServicer):
    """Explains, or never answers."""

    def __init__(self, hangs: bool = False):
        self._hangs = hangs

    async def Explain(self, request: ro.ExplainRequest, context: Any) -> ro.ExplainResponse:
        if self._hangs:
            await asyncio.Event().wait()
        line = Waiting(request.subject or "r", "stands", "you")
        return ro.ExplainResponse(waiting=[waiting_to_pb(line)])


async def test_a_service_is_found_by_its_listing_and_a_silent_one_bounded(valkey: Redis) -> None:
    registry = Registry(valkey, "r")
    asked = Subject(Kind.GROUP, G0)
    add = add_RouterServiceServicer_to_server
    async with (
        serve("127.0.0.1:0", [(add, Router())]) as good,
        serve("127.0.0.1:0", [(add, Router(hangs=True))], grace_s=0.0) as bad,
        registry.announce("router", "a", good.address),
        registry.announce("router", "z-stands-by", bad.address),
    ):
        answers = await ask(valkey, "r", asked, G0, within_s=0.5)
    assert answers["router"].waiting[0].subject == G0
    assert "it is starting, or not running" in answers["trainer"].problem


async def test_the_command_says_it_all_as_json(
    valkey: Redis, valkey_socket: Any, hung: Story
) -> None:
    streams = RunStreams(valkey, "r")
    await streams.append(
        [StreamEntry(m.stream, "s", str(n), m.data) for n, m in enumerate(hung.messages)]
    )
    redis = f"unix://{valkey_socket}"
    result = in_thread("explain", f"{G1}.1.0", "--run", "r", "--redis", redis, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["subject"] == {"kind": "episode", "id": f"{G1}.1.0"}
    assert found["answers"][-1]["service"] == "streams"
    assert found["answers"][-1]["waiting"][0]["state"] == "step of turn 2 runs: sleep 600"
    assert any("its limit of 60 s" in step for step in found["steps"])


def in_thread(*arguments: str) -> Result:
    """The command runs a loop of its own, so it gets a thread of its own here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(CliRunner().invoke, app, list(arguments)).result()
