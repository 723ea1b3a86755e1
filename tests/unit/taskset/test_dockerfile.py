"""The supported part of a Dockerfile is read as Docker means it; the rest is refused by line."""

from __future__ import annotations

import pytest

from muster.dockerfile import (
    CopyFiles,
    Recipe,
    RunCommand,
    SetEnv,
    SetWorkdir,
    copied,
    examine,
    parse,
    run_lines,
    way_out,
)
from muster.errors import InvalidInput


def test_each_supported_instruction_becomes_its_step():
    text = """
    # a comment
    FROM ubuntu:24.04 AS base
    USER root
    WORKDIR /srv
    ENV A=1 B="two words"
    ENV C the rest
    COPY --chmod=755 --chown=root:root run.sh data/ ./
    RUN echo one && \\
        # a comment between

        echo two
    """
    assert parse(text) == Recipe(
        "ubuntu:24.04",
        (
            SetWorkdir("/srv"),
            SetEnv("A", "1"),
            SetEnv("B", "two words"),
            SetEnv("C", "the rest"),
            CopyFiles("run.sh", "/srv/", 0o755),
            CopyFiles("data/", "/srv/", 0o755),
            RunCommand("echo one && echo two"),
        ),
        "/srv",
        lines=(5, 6, 6, 7, 8, 8, 9),
    )


def test_paths_follow_the_working_directory_and_known_variables():
    recipe = parse("FROM x\nENV D=lib\nWORKDIR /a\nWORKDIR ${D}/$D\nCOPY f g\nCOPY f /a")
    assert recipe.workdir == "/a/lib/lib"
    assert recipe.steps[-2:] == (CopyFiles("f", "/a/lib/lib/g"), CopyFiles("f", "/a/"))


def test_an_env_line_sees_only_the_lines_before_it():
    assert parse("FROM x\nENV A=1\nENV A=2 B=$A").steps[-1] == SetEnv("B", "1")


def test_the_list_form_of_run_is_quoted_for_the_shell():
    assert parse('FROM x\nRUN ["echo", "a b"]').steps == (RunCommand("echo 'a b'"),)


def test_without_workdir_the_root_is_the_working_directory():
    assert parse("FROM x").workdir == "/"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("COPY ../a b", "beside the Dockerfile, or below, only"),
        ("COPY a", "a source and a destination"),
        ("ENV 1A=2", "NAME=value"),
        ("ENV A='2", "cannot be read"),
        ("RUN", "no argument"),
        ("RUM true", "did you mean RUN"),
        ('RUN ["true"', "JSON strings"),
    ],
)
def test_what_no_builder_could_read_is_refused_by_line(line: str, problem: str):
    with pytest.raises(InvalidInput, match=problem) as caught:
        parse(f"FROM x\n\n{line}\n")
    assert caught.value.field == "environment/Dockerfile line 3"
    assert "WORKDIR, ENV, COPY" in caught.value.way_out


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ADD a b", "ADD is not supported"),
        ("ARG A=1", "ARG is not supported"),
        ("HEALTHCHECK CMD true", "HEALTHCHECK is not supported"),
        ("USER dev", "user root only"),
        ("FROM y", "only one plain FROM"),
        ("RUN --mount=type=cache,target=/x true", "no flags"),
        ("RUN cat <<EOF > f", "here-documents"),
        ("RUN cd / && apt-get -y install gcc", "no box has"),
        ("RUN apk add gcc", "no box has"),
        ("COPY --from=y a b", "COPY takes only"),
        ("COPY --chown=dev a b", "user root only"),
        ("WORKDIR $HOME/x", "$HOME is not set"),
        ("WORKDIR ${A:-x}", "can be expanded"),
        ("# escape=`", "escape character"),
    ],
)
def test_what_only_a_builder_can_do_leaves_no_steps_and_tells_its_line(line: str, problem: str):
    recipe = parse(f"FROM x\n\nRUN true\n{line}\nCOPY a", "Dockerfile")
    assert recipe.steps == ()
    assert recipe.unbuildable.startswith("Dockerfile line 4: ")
    assert problem in recipe.unbuildable
    assert line in recipe.unbuildable


def test_of_what_only_a_builder_can_do_image_and_folder_are_known():
    text = (
        "ARG V=1\nFROM a:$V\nWORKDIR /build\nFROM --platform=linux b AS last\nWORKDIR /c\nWORKDIR d"
    )
    recipe = parse(text)
    assert (recipe.base, recipe.workdir) == ("b", "/c/d")


def test_packages_that_a_line_can_do_without_stop_nothing():
    assert parse("FROM x\nRUN apt-get update || true").unbuildable == ""


def test_what_changes_nothing_in_a_box_is_left_out_and_told():
    recipe = parse('FROM x\nLABEL a=b\nEXPOSE 80\nRUN true\nCMD ["sh"]\nENTRYPOINT sh')
    assert recipe.steps == (RunCommand("true"),)
    told = ("line 2: LABEL", "line 3: EXPOSE", "line 5: CMD", "line 6: ENTRYPOINT")
    assert recipe.inert == told


@pytest.mark.parametrize("text", ["", "# nothing\n", "WORKDIR /x\nFROM y"])
def test_a_dockerfile_begins_with_from(text: str):
    with pytest.raises(InvalidInput, match="FROM"):
        parse(text)


FILES = ["Dockerfile", "a.txt", "data/b.txt", "data/deep/c.txt"]


@pytest.mark.parametrize(
    ("src", "dst", "pairs"),
    [
        ("a.txt", "/app/", [("a.txt", "/app/a.txt")]),
        ("a.txt", "/app/z", [("a.txt", "/app/z")]),
        ("./a.txt", "/app/", [("a.txt", "/app/a.txt")]),
        (
            "data",
            "/app",
            [("data/b.txt", "/app/b.txt"), ("data/deep/c.txt", "/app/deep/c.txt")],
        ),
        ("*.txt", "/app/", [("a.txt", "/app/a.txt")]),
        ("data/*", "/app/", [("data/b.txt", "/app/b.txt"), ("data/deep/c.txt", "/app/c.txt")]),
        (".", "/app/", [(path, f"/app/{path}") for path in FILES]),
    ],
)
def test_copy_stands_for_these_files(src: str, dst: str, pairs: list[tuple[str, str]]):
    assert copied(CopyFiles(src, dst), FILES) == pairs


def test_copy_of_nothing_is_refused():
    with pytest.raises(InvalidInput, match="no such file"):
        copied(CopyFiles("b*", "/app/"), FILES)


def test_all_that_no_builder_could_read_is_told_at_once():
    recipe, refusals = examine("FROM x\nRUM true\nRUN true\nENV 1A=2\n")
    assert [one.field for one in refusals] == [
        "environment/Dockerfile line 2",
        "environment/Dockerfile line 4",
    ]
    assert recipe.lines == (3,)


def test_all_that_only_a_builder_can_do_is_told_at_once():
    """What follows from the first of them is not."""
    recipe = parse("FROM x\nARG V=1\nWORKDIR /a/$V\nADD a b\nRUM typo")
    assert recipe.unbuildable == (
        "environment/Dockerfile line 2: ARG is not supported (ARG V=1); "
        "line 4: ADD is not supported (ADD a b)"
    )


def test_packages_lead_to_a_base_and_other_lines_to_a_builder():
    assert "docker" not in way_out(parse("FROM x\nRUN apt-get install gcc").unbuildable)
    assert "sandbox.bases" in way_out(parse("FROM x\nRUN apt-get install gcc").unbuildable)
    assert "sandbox.backend = docker" in way_out(parse("FROM x\nADD a b").unbuildable)


def test_the_lines_of_commands_are_those_that_they_begin_in():
    assert run_lines("FROM x\n\nRUN a && \\\n  b\nCOPY a b\nrun c\n") == [3, 6]
