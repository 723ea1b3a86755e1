"""What a step leaves to the next one, however strange or large: no box ends of it, nor its fork."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.box import BoxFailure, Source
from tests.integration.native_world import fresh, told
from tests.integration.sandbox_owner import owner

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        await fresh(made, "a")
        yield made


async def forked(backend: NativeBackend, command: str) -> str:
    """What the command says in a fork of `a`, whose session is handed on as the service does."""
    made = await backend.snapshot("a", "L-a", keep=True)
    await backend.start("f", Limits(), Source(layer="L-a"))
    await backend.set_session("f", made.cwd, made.env)
    return await told(backend, "f", command)


async def test_an_environment_that_no_header_holds_goes_into_a_fork(
    backend: NativeBackend,
) -> None:
    # A byte each, and six in JSON: 1.4 MB.
    large = "for i in $(seq 30); do export V$i=$(head -c 8000 /dev/zero | tr '\\0' '\\1'); done"
    await told(backend, "a", large)
    assert await forked(backend, "echo ${#V1} ${#V30}") == "8000 8000\n"
    assert await told(backend, "a", "echo ${#V1} ${#V30}") == "8000 8000\n"


async def test_what_is_no_text_is_left_out_of_a_snapshot_s_session(
    backend: NativeBackend,
) -> None:
    leave = "export BAD=$'\\xff' GOOD=$'\\xc3\\xa9'; mkdir $'/app/\\xff' && cd $'/app/\\xff'"
    await told(backend, "a", leave)
    made = await backend.snapshot("a", "L-text", keep=True)
    assert (made.cwd, made.env["GOOD"]) == ("/", "é")
    assert "BAD" not in made.env
    "".join((made.cwd, *made.env, *made.env.values())).encode()
    # The box itself goes on with them.
    said = await told(backend, "a", 'test "$BAD" = $\'\\xff\' && basename "$PWD" | od -An -tx1')
    assert said.split() == ["ff", "0a"]


async def test_a_command_that_no_header_holds_is_the_caller_s_trouble_alone(
    backend: NativeBackend,
) -> None:
    with pytest.raises(BoxFailure, match="nothing was sent"):
        await backend.run("a", "\1" * (200 << 10), 20)
    assert await told(backend, "a", "echo on") == "on\n"


async def test_a_survivor_that_ends_while_its_step_is_waited_for_is_only_lost(
    tmp_path: Path,
) -> None:
    async with owner(tmp_path / "run") as first:
        await first.box("a", "mine")
        await first.step("a", 0, "true")
        await first.kill()
    async with open_native(tmp_path / "run") as second:
        assert [found.box for found in await second.survivors()] == ["a"]
        await second.end("a")
        with pytest.raises(BoxFailure, match="no box a"):
            await second.rejoin("a")
        with pytest.raises(BoxFailure, match="no box a"):
            await second.note("a", b"x")


async def test_what_notes_share_comes_back_with_each_of_them(tmp_path: Path) -> None:
    async with owner(tmp_path / "run") as first:
        for name, shared in (("a", "both"), ("b", "both"), ("c", "own"), ("d", "")):
            await first.box(name)
            await first.call("note", name, f"of {name}", shared=shared)
        await first.call("end", "a")
        await first.call("note", "c", "newer", shared="both")
        await first.kill()
    async with owner(tmp_path / "run") as second:
        found = {
            name: (each["note"], each["shared"])
            for name, each in (await second.survivors()).items()
        }
        assert found == {"b": ("of b", "both"), "c": ("newer", "both"), "d": ("of d", "")}
    async with open_native(tmp_path / "run"):
        pass
