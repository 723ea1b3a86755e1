"""Snapshots of real boxes: what only overlayfs shows, and whose word a verifier takes."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.box import BoxFailure, JudgeSpec, PutFile
from tests.integration.native_world import ENV, fresh, output, told

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        await fresh(made, "a")
        yield made


# What a box sees of its own files, as one text: names, kinds, modes, owners, links, content.
LOOK = """python3 - <<'END'
import os, stat
inodes = {}
for root, folders, files in os.walk("/app"):
    folders.sort()
    for name in sorted(folders + files) + ["."]:
        path = os.path.join(root, name)
        s = os.lstat(path)
        text = ""
        if stat.S_ISREG(s.st_mode):
            text = open(path, "rb").read().hex()
        elif stat.S_ISLNK(s.st_mode):
            text = os.readlink(path)
        print(path, oct(s.st_mode), s.st_uid, text, s.st_mtime_ns)
END
"""
# One random change after another below /app, drawn from few names so that they meet.
CHANGE = """python3 - {seed} <<'END'
import os, random, shutil, sys
dice = random.Random(int(sys.argv[1]))
def path():
    return "/app/" + "/".join(dice.choice("abc") for _ in range(dice.randint(1, 3)))
for _ in range(60):
    one, two = path(), path()
    try:
        match dice.randrange(9):
            case 0 | 1: os.makedirs(one)
            case 2 | 3: open(one, "wb").write(dice.randbytes(4))
            case 4: os.remove(one)
            case 5: shutil.rmtree(one)
            case 6: os.symlink(dice.choice(["a", "/app/b", "nowhere"]), one)
            case 7: os.link(one, two, follow_symlinks=False)
            case 8: shutil.move(one, two) if dice.random() < 0.5 else os.chmod(one, 0o700)
    except (OSError, shutil.Error):
        pass
END
"""


@pytest.mark.parametrize("seed", range(6))
async def test_a_box_over_a_squashed_snapshot_sees_what_one_over_the_chain_sees(
    seed: int, backend: NativeBackend
) -> None:
    dice, layer = random.Random(seed), ""
    await backend.end("a")
    for depth in range(1, 7):
        box, top = f"b{depth}", f"L-{depth}"
        await fresh(backend, box, layer)
        # Twice: in the second half a box works on what it has changed itself.
        for _ in range(2):
            await backend.run(box, CHANGE.format(seed=dice.randrange(10**9)), 60)
        before = await told(backend, box, LOOK)
        made = await backend.snapshot(box, top, keep=depth % 2 == 0)
        assert made.depth == depth
        layer = top
    await backend.squash(layer, "L-one")
    for name, source in (("chain", layer), ("one", "L-one")):
        await fresh(backend, name, source)
        assert (await told(backend, name, LOOK)).splitlines() == before.splitlines(), name
    assert len(before.splitlines()) > 5
    # And both are alike for what is written on top of them.
    for name in ("chain", "one"):
        await backend.run(name, CHANGE.format(seed=seed), 60)
    assert without_times(await told(backend, "chain", LOOK)) == without_times(
        await told(backend, "one", LOOK)
    )


def without_times(text: str) -> list[str]:
    return [line.rsplit(" ", 1)[0] for line in text.splitlines()]


async def test_what_was_removed_stays_removed_over_any_number_of_layers(
    backend: NativeBackend,
) -> None:
    await told(backend, "a", "mkdir -p /etc/mine /srv/full; echo x > /srv/full/x; rm /etc/hosts")
    await backend.snapshot("a", "L-a", keep=True)
    await fresh(backend, "b", "L-a")
    await told(backend, "b", "rm -r /srv/full; mkdir /srv/full; echo y > /srv/full/y")
    await backend.snapshot("b", "L-b", keep=True)
    await backend.squash("L-b", "L-c")
    for number, layer in enumerate(("L-b", "L-c")):
        await fresh(backend, f"f{number}", layer)
        look = "ls /srv/full; test -e /etc/hosts || echo gone; test -e /etc/passwd && echo there"
        assert await told(backend, f"f{number}", look) == "y\ngone\nthere\n"


async def test_a_chain_far_deeper_than_it_is_squashed_at_starts_a_box(
    backend: NativeBackend,
) -> None:
    depth, layer = 70, ""
    await backend.end("a")
    for number in range(depth):
        await fresh(backend, f"b{number}", layer)
        await told(backend, f"b{number}", f"echo {number} > /app/f{number}")
        layer = f"L-{number}"
        await backend.snapshot(f"b{number}", layer, keep=False)
    await fresh(backend, "top", layer)
    assert len((await told(backend, "top", "cat f*")).split()) == depth


async def test_a_kept_box_s_processes_stand_still_while_it_is_copied_and_go_on(
    backend: NativeBackend,
) -> None:
    # Two files that are written one after the other: a copy in between would tell them apart.
    writer = (
        "python3 -c '\nimport os\nn = 0\nwhile True:\n  n += 1\n"
        '  for name in "xy":\n    open("/app/" + name, "w").write(str(n))\' &'
    )
    await told(backend, "a", f"{writer}\nuntil test -s y; do sleep 0.01; done")
    await told(backend, "a", "mkdir m; cd m; seq 3000 | xargs touch")
    for number in range(5):
        await backend.snapshot("a", f"L-{number}", keep=True)
        await fresh(backend, f"f{number}", f"L-{number}")
        x, y = (await told(backend, f"f{number}", "cat /app/x; echo; cat /app/y")).split("\n")
        # Between two writes, or within one: but never a whole round apart.
        assert not x or not y or int(x) - int(y) in (0, 1)
    again = (
        "cd /app; n=$(cat x); for i in $(seq 500); do test $(cat x) != $n && echo on && break; done"
    )
    assert "on" in await told(backend, "a", again)


async def test_the_folder_that_is_everything_s_parent_keeps_its_mode(
    backend: NativeBackend,
) -> None:
    await told(backend, "a", "chmod 751 /")
    await backend.snapshot("a", "L-a", keep=False)
    await fresh(backend, "b", "L-a")
    await backend.snapshot("b", "L-b", keep=True)
    await backend.squash("L-b", "L-c")
    await fresh(backend, "c", "L-c")
    for box in ("b", "c"):
        assert await told(backend, box, "stat -c %a /") == "751\n"


async def test_a_fork_has_its_own_limits_whatever_lies_below_it(backend: NativeBackend) -> None:
    await told(backend, "a", "head -c 20M /dev/zero > /app/big")
    await backend.snapshot("a", "L-a", keep=False)
    await fresh(backend, "b", "L-a", Limits(disk_bytes=8 << 20))
    assert await told(backend, "b", "echo small > /app/small; stat -c %s big") == f"{20 << 20}\n"
    assert (await backend.run("b", "head -c 9M /dev/zero > /app/more", 20)).disk_full


async def judged(backend: NativeBackend, box: str, script: str) -> str:
    await backend.seal(box)
    test = PutFile("/tests/test.sh", 0o755, script.encode())
    spec = JudgeSpec((test,), "/tests/test.sh", "/", dict(ENV), 20, Limits())
    return output((await backend.judge(box, spec)).evidence)


async def test_a_verifier_takes_its_tools_from_the_set_up_and_not_from_the_agent(
    backend: NativeBackend,
) -> None:
    await told(backend, "a", "echo 'set-up' > /etc/answer; echo x > /app/given")
    await backend.snapshot("a", "L-a", keep=False)
    await fresh(backend, "b", "L-a")
    await told(backend, "b", "echo agent > /etc/answer; echo agent > /etc/other; echo y > given")
    found = await judged(backend, "b", "cat /etc/answer /app/given; ls /etc/other || echo none")
    assert found.startswith("set-up\ny\n")
    assert found.endswith("none\n")


async def test_what_an_agent_left_in_a_kept_snapshot_is_no_set_up_of_its_forks(
    backend: NativeBackend,
) -> None:
    await told(backend, "a", "echo set-up > /etc/answer; echo x > /app/given")
    await backend.snapshot("a", "L-setup", keep=False)
    await fresh(backend, "b", "L-setup")
    await told(backend, "b", "echo agent > /etc/answer; echo y > /app/given")
    await backend.snapshot("b", "L-agent", keep=True)
    await backend.squash("L-agent", "L-one")
    # Not even through a box between them that ends in a snapshot.
    await fresh(backend, "c", "L-agent")
    await backend.snapshot("c", "L-more", keep=False)
    for number, layer in enumerate(("L-agent", "L-one", "L-more")):
        await fresh(backend, f"f{number}", layer)
        assert await told(backend, f"f{number}", "cat /etc/answer") == "agent\n"
        found = await judged(backend, f"f{number}", "cat /etc/answer /app/given")
        assert found == "set-up\ny\n", layer


async def test_a_squashed_snapshot_keeps_the_set_up_that_verifiers_need(
    backend: NativeBackend,
) -> None:
    await told(backend, "a", "echo set-up > /etc/answer")
    await backend.snapshot("a", "L-setup", keep=False)
    await fresh(backend, "b", "L-setup")
    await backend.snapshot("b", "L-agent", keep=True)
    await backend.end("b")
    await backend.squash("L-agent", "L-one")
    await backend.drop("L-agent")
    with pytest.raises(BoxFailure, match="in use"):
        await backend.drop("L-setup")
    await backend.drop("L-one")
    assert await backend.drop("L-setup") is True
