"""Raw layers laid over one another, against a dumb picture of what overlayfs means by them.

Real folders are written (whiteouts and trusted marks need root), no mount is made: that boxes see
the same is what the integration tests show.
"""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from services.sandbox.adapters.native import layers

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts and opaque marks need root"),
]
OPAQUE = "trusted.overlay.opaque"

# A raw layer as a plain value: name → bytes (file), None (whiteout), or a folder.
Tree = dict[str, "Node"]
Folder = tuple[bool, Tree]  # whether it is opaque, what is in it
Node = bytes | None | Folder


def random_tree(dice: random.Random, depth: int) -> Tree:
    """Few names, so that layers meet in every way."""
    tree: Tree = {}
    for name in dice.sample("abcd", dice.randint(0, 4)):
        kind = dice.choice(["file", "whiteout", "folder", "folder", "folder"])
        if kind == "file" or (kind == "folder" and depth == 0):
            tree[name] = dice.randbytes(3)
        elif kind == "whiteout":
            tree[name] = None
        else:
            tree[name] = (dice.random() < 0.3, random_tree(dice, depth - 1))
    return tree


def write(tree: Tree, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, node in tree.items():
        path = folder / name
        if node is None:
            os.mknod(path, stat.S_IFCHR, 0)
        elif isinstance(node, bytes):
            path.write_bytes(node)
        else:
            write(node[1], path)
            if node[0]:
                os.setxattr(path, OPAQUE, b"y")


def seen(stack: list[Tree]) -> dict[str, object]:
    """What a box sees of raw layers, the top first: straight from the rules of overlayfs."""
    found: dict[str, object] = {}
    for name in {name for tree in stack for name in tree}:
        below: list[Tree] = []
        for tree in stack:
            if name not in tree:
                continue
            node = tree[name]
            if isinstance(node, tuple):
                below.append(node[1])
                if node[0]:
                    break  # an opaque folder: nothing below shows
                continue
            if not below and node is not None:
                found[name] = node
            break  # a file or whiteout ends it, and is covered by folders above it
        if below:
            found[name] = seen(below)
    return found


def ghosts(tree: Tree, base: Tree | None, at: str = "") -> list[str]:
    """Whiteouts that a box would see as names: in folders that lie on none, nobody looks."""
    found = []
    for name, node in tree.items():
        if isinstance(node, tuple):
            below = base.get(name) if base is not None and not node[0] else None
            found += ghosts(node[1], below[1] if isinstance(below, tuple) else None, f"{at}/{name}")
        elif node is None and base is None:
            found.append(f"{at}/{name}")
    return found


def read(folder: Path) -> Tree:
    tree: Tree = {}
    for entry in os.scandir(folder):
        facts = entry.stat(follow_symlinks=False)
        if layers.is_whiteout(facts):
            tree[entry.name] = None
        elif entry.is_dir(follow_symlinks=False):
            opaque = OPAQUE in os.listxattr(entry.path)
            tree[entry.name] = (opaque, read(Path(entry.path)))
        else:
            tree[entry.name] = Path(entry.path).read_bytes()
    return tree


def merged(folder: Path, *sources: Path) -> Path:
    target, links = folder / "target", folder / "links"
    target.mkdir()
    links.mkdir()
    layers.merge([str(source) for source in sources], str(target), str(links))
    assert list(links.iterdir()) == []
    return target


@pytest.mark.parametrize("seed", range(60))
def test_boxes_see_the_same_over_the_merged_layer_whatever_lies_below_it(
    seed: int, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    stack = [random_tree(dice, 3) for _ in range(dice.randint(1, 5))]
    base = random_tree(dice, 3)
    sources = []
    for number, tree in enumerate(reversed(stack)):
        write(tree, tmp_path / f"s{number}")
        sources.append(tmp_path / f"s{number}")
    target = merged(tmp_path, *sources)
    assert seen([read(target)]) == seen(stack)
    write(base, tmp_path / "base")
    layers.prune(str(target), str(tmp_path / "base"))
    result = read(target)
    assert seen([result, base]) == seen([*stack, base])
    assert ghosts(result, base) == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    return made


def test_hard_links_stay_one_file(source: Path, tmp_path: Path) -> None:
    (source / "one").write_bytes(b"x")
    (source / "deep").mkdir()
    os.link(source / "one", source / "deep" / "two")
    os.symlink("nowhere", source / "link")
    os.link(source / "link", source / "again", follow_symlinks=False)
    target = merged(tmp_path, source)
    assert os.path.samestat((target / "one").stat(), (target / "deep" / "two").stat())
    assert os.path.samestat((target / "link").lstat(), (target / "again").lstat())
    assert os.readlink(target / "again") == "nowhere"
    assert (target / "one").stat().st_nlink == 2


def test_a_name_replaced_above_leaves_its_other_name_alone(source: Path, tmp_path: Path) -> None:
    (source / "one").write_bytes(b"x")
    os.link(source / "one", source / "two")
    above = tmp_path / "above"
    above.mkdir()
    (above / "one").write_bytes(b"new")
    target = merged(tmp_path, source, above)
    assert ((target / "one").read_bytes(), (target / "two").read_bytes()) == (b"new", b"x")


def test_owner_mode_times_and_marks_are_kept(source: Path, tmp_path: Path) -> None:
    (source / "folder").mkdir()
    (source / "folder" / "file").write_bytes(b"x")
    os.mkfifo(source / "fifo")
    os.symlink("target", source / "link")
    os.setxattr(source / "folder" / "file", "trusted.mine", b"kept")
    os.setxattr(source / "folder", "trusted.overlay.origin", b"of another place")
    paths = ("folder/file", "folder", "fifo", "link")
    for path in paths:
        os.chown(source / path, 7, 8, follow_symlinks=False)
    for path, mode in (("folder/file", 0o4751), ("folder", 0o2770), ("fifo", 0o606)):
        os.chmod(source / path, mode)
    for number, path in enumerate(paths):
        os.utime(source / path, ns=(10**18, 10**18 + number), follow_symlinks=False)
    target = merged(tmp_path, source)
    for path in paths:
        before, after = os.lstat(source / path), os.lstat(target / path)
        for name in ("st_mode", "st_uid", "st_gid", "st_mtime_ns"):
            assert getattr(after, name) == getattr(before, name), (path, name)
    assert os.getxattr(target / "folder" / "file", "trusted.mine") == b"kept"
    assert os.listxattr(target / "folder") == []


def test_times_of_a_folder_stay_when_whiteouts_leave_it(source: Path, tmp_path: Path) -> None:
    (source / "folder").mkdir()
    os.mknod(source / "folder" / "gone", stat.S_IFCHR, 0)
    os.utime(source / "folder", ns=(10**18, 10**18))
    target = merged(tmp_path, source)
    (tmp_path / "base").mkdir()
    layers.prune(str(target), str(tmp_path / "base"))
    assert list((target / "folder").iterdir()) == []
    assert (target / "folder").stat().st_mtime_ns == 10**18


def test_holes_stay_holes(source: Path, tmp_path: Path) -> None:
    with open(source / "sparse", "wb") as file:
        file.seek(64 << 20)
        file.write(b"end")
        file.truncate(128 << 20)
    target = merged(tmp_path, source)
    facts = (target / "sparse").stat()
    assert facts.st_size == 128 << 20
    assert facts.st_blocks * 512 < 1 << 20
    with open(target / "sparse", "rb") as file:
        file.seek(64 << 20)
        assert file.read(4) == b"end\0"


def test_links_that_lead_out_are_copied_and_never_followed(source: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    os.symlink(outside, source / "out")
    above = tmp_path / "above"
    (above / "out").mkdir(parents=True)
    (above / "out" / "kept").write_bytes(b"written")
    target = merged(tmp_path, source, above)
    assert (outside / "kept").read_bytes() == b"kept"
    assert not (target / "out").is_symlink()
    assert (target / "out" / "kept").read_bytes() == b"written"
    assert (source / "out").is_symlink()


def test_folders_deeper_than_a_path_can_be_are_copied_and_covered(
    source: Path, tmp_path: Path
) -> None:
    depth = 3000  # more than descriptors or Python's own stack would take, and 6 kB of path
    here = os.open(source, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir("d", dir_fd=here)
            here, old = os.open("d", os.O_RDONLY, dir_fd=here), here
            os.close(old)
        os.close(here)
        target = merged(tmp_path, source)
        assert deep(target) == depth
        above = tmp_path / "above"
        above.mkdir()
        (above / "d").write_bytes(b"covers all of it")
        layers.prune(str(target), str(source))
        layers.merge([str(above)], str(target), str(tmp_path / "links"))
        assert (target / "d").read_bytes() == b"covers all of it"
    finally:
        # What pytest itself could not remove.
        here = os.open(tmp_path, os.O_RDONLY)
        for name in ("source", "target"):
            layers.remove(here, name)
        os.close(here)
    assert not source.exists()


def deep(folder: Path) -> int:
    count, here = 0, os.open(folder, os.O_RDONLY)
    while os.listdir(here):
        here, old = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(old)
        count += 1
    os.close(here)
    return count
