"""Docker: what an image says of sessions, whose fault a build was, what a successor is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.adapters.docker import sessions
from services.sandbox.adapters.docker.building import failure, with_known_bases
from services.sandbox.adapters.docker.engine import EngineTrouble, Told
from services.sandbox.adapters.docker.records import Record, Records
from services.sandbox.adapters.docker.shell import Session
from services.sandbox.adapters.docker.transfer import Links, Untold
from services.sandbox.box import Evidence, KeptStep
from services.sandbox.environment import BASE_ENV, VERIFIER_ENV

PYTHON = sessions.of_image(
    {"Config": {"WorkingDir": "/srv", "Env": ["PATH=/usr/local/bin:/usr/bin", "LANG=C", "V=3.13"]}}
)


def test_a_session_is_the_usual_then_the_image_s_then_the_task_s() -> None:
    found = sessions.entered(PYTHON, "", "", {"V": "4", "OWN": "x"})
    assert found.cwd == "/srv"
    told = {"PATH": "/usr/local/bin:/usr/bin", "LANG": "C", "V": "4", "OWN": "x"}
    assert found.env == BASE_ENV | told
    assert sessions.entered(PYTHON, "", "/own", {}).cwd == "/own"


def test_an_image_that_says_nothing_leaves_the_usual() -> None:
    found = sessions.entered(sessions.of_image({"Config": None}), "root", "", {})
    assert found == Session("/", BASE_ENV)


def test_another_user_than_root_is_not_sent_to_root_s_home() -> None:
    env = sessions.entered(PYTHON, "app:app", "", {}).env
    assert not {"HOME", "USER"} & env.keys()


def test_a_verifier_looks_for_programs_where_only_the_image_has_them_before_the_usual() -> None:
    image = Session("/", {"PATH": "/opt/own:/usr/games:.:/:/usr/../opt:/usr/bin"})
    path = sessions.of_verifier(image, "/", VERIFIER_ENV).env["PATH"].split(":")
    assert path[:2] == ["/usr/games", "/usr/bin"]
    assert set(path[2:]) <= set(VERIFIER_ENV["PATH"].split(":"))
    own = sessions.of_verifier(image, "/", VERIFIER_ENV | {"PATH": "/opt/venv/bin:/bin"})
    assert own.env["PATH"] == "/opt/venv/bin:/bin"


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("NAME", "given", True),
        ("VERSION", "3.13.1", True),
        ("JAVA_HOME", "/usr/lib/jvm/17", True),
        ("GOPATH", "/go", False),
        ("APP", "src/app", False),
        ("OPTIONS", "--load=/app/evil.so", False),
        ("PYTHONPATH", "/usr/share/lib", True),
        ("PYTHONPATH", "lib", False),
        ("PYTHON_VERSION", "3.13", True),
        ("LD_PRELOAD", "evil.so", False),
        ("BASH_ENV", "rc", False),
        ("GIT_DIR", "repository", False),
    ],
)
def test_no_variable_of_the_image_leads_a_verifier_to_the_agent_s_files(
    name: str, value: str, kept: bool
) -> None:
    found = sessions.of_verifier(Session("/", {name: value}), "/", VERIFIER_ENV)
    assert (found.env.get(name) == value) is kept


@pytest.mark.parametrize(
    "error",
    [
        "The command '/bin/sh -c false' returned a non-zero code: 1",
        "dockerfile parse error line 2: unknown instruction: NONSENSE",
        "COPY failed: file not found in build context or excluded by .dockerignore: stat x",
        "Unknown flag: nonsense",
    ],
)
def test_what_the_author_has_to_mend_is_told_with_the_line(error: str) -> None:
    found = failure(Told(error, ("Step 1/2 : FROM x\n", "said\n", "Step 2/2 : RUN false\n")))
    assert isinstance(found, InvalidInput)
    assert found.value == "false"
    assert error in str(found)


@pytest.mark.parametrize(
    "error",
    [
        "write /var/lib/docker/tmp/x: no space left on device",
        "COPY failed: stat /var/lib/docker/x: no space left on device",
        "context canceled",
        "OCI runtime create failed: unable to apply cgroup configuration",
        "failed to create shim task: ttrpc: closed: unknown",
        "error creating overlay mount: device or resource busy",
    ],
)
def test_trouble_of_the_engine_in_a_build_is_not_the_author_s(error: str) -> None:
    assert isinstance(failure(Told(error, ("Step 1/1 : RUN true\n",))), EngineTrouble)


@pytest.mark.parametrize(
    "lines",
    [
        "ADD http://a/x /x",
        "ADD git@a:b /x",
        "ADD \\\n  https://a/x /x",
        "add $A /x",
        "ONBUILD ADD http://a/x /x",
        "COPY \\\n --from=busybox /x /x",
        "COPY --from=$A /x /x",
    ],
)
def test_what_the_engine_would_fetch_is_refused(lines: str) -> None:
    with pytest.raises(InvalidInput):
        with_known_bases(f"FROM a\n{lines}\n", str)


def test_files_are_added_and_copied_from_stages_and_known_images() -> None:
    text = "FROM a AS one\nADD x.tar /x\nCOPY --from=one /a /b\nCOPY --from=0 /a /b\nRUN x://y $Z\n"
    assert with_known_bases(text, lambda image: image) == text
    assert with_known_bases("COPY --chmod=1 --from=b /x /y", lambda image: f"id-{image}") == (
        "COPY --chmod=1 --from=id-b /x /y"
    )


def links(**own: str) -> Links:
    """Links in /app, beside the agent's folder /app/d; /usr is the trusted state's folder."""
    made = Links(
        {f"/app/{name}": link for name, link in own.items()}, frozenset({"/app", "/app/d"})
    )
    made.tell("/usr", None)
    made.tell("/usr/hop", "/proc/self")
    made.tell("/absent", None, absent=True)
    return made


@pytest.mark.parametrize(
    ("link", "snare"),
    [
        ("/tests/expected", True),
        ("../tests", True),
        ("d/../../logs/x", True),
        ("other", True),
        ("/usr/hop/fd", True),
        ("/dev/fd/3", True),
        ("/", True),
        ("d", False),
        ("/absent/tests/x", False),
        ("/usr", False),
        ("loop", False),
    ],
)
def test_a_link_is_a_snare_wherever_it_passes_what_is_the_verifier_s(
    link: str, snare: bool
) -> None:
    found = links(one=link, other="/tests", loop="loop")
    found.tell("/dev", None)
    assert found.is_snare("/app/one") is snare


def test_what_is_not_known_of_the_trusted_state_is_asked_for() -> None:
    with pytest.raises(Untold) as caught:
        links(one="/usr/unknown/x").is_snare("/app/one")
    assert caught.value.path == "/usr/unknown"


def record(container: str = "c1") -> Record:
    return Record(container, container, Limits(), "image")


def step(turn: int, size: int = 1) -> KeptStep:
    return KeptStep(turn, "true", Evidence(head=b"x" * size))


async def test_a_successor_finds_the_note_and_the_newest_answers(tmp_path: Path) -> None:
    records, one = Records(tmp_path / "boxes", answers_kept=2), record()
    await records.note(one, b"noted", b"shared")
    for turn in range(4):
        one.newest_turn = turn
        await records.keep(one, step(turn))
    (found,) = Records(tmp_path / "boxes").load().values()
    assert (found.record, found.note, found.shared) == (one, b"noted", b"shared")
    assert [kept.turn for kept in found.kept] == [2, 3]


async def test_answers_are_kept_within_their_bytes_but_for_the_newest(tmp_path: Path) -> None:
    records, one = Records(tmp_path / "boxes"), record()
    await records.note(one, b"noted", b"")
    for turn in range(4):
        await records.keep(one, step(turn, 5 << 20))
    (found,) = Records(tmp_path / "boxes").load().values()
    assert [kept.turn for kept in found.kept] == [2, 3]


async def test_what_notes_share_lies_there_once_until_the_last_box_goes(tmp_path: Path) -> None:
    records = Records(tmp_path / "boxes")
    for name in ("c1", "c2"):
        await records.note(record(name), b"noted", b"shared")
    assert len(list((tmp_path / "boxes" / "shared").iterdir())) == 1
    records.forget("c1")
    assert [found.shared for found in Records(tmp_path / "boxes").load().values()] == [b"shared"]
    records.forget("c2")
    assert list((tmp_path / "boxes" / "shared").iterdir()) == []


async def test_a_box_without_a_note_and_one_forgotten_leave_nothing(tmp_path: Path) -> None:
    records, one = Records(tmp_path / "boxes"), record()
    await records.save(one)
    await records.note(record("c2"), b"noted", b"")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(records.save(record("c2")))
        await asyncio.sleep(0)
        records.forget("c2")
    assert list((tmp_path / "boxes").iterdir()) == []
