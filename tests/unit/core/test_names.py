"""Names of groups, and ids of stream entries: made and read in one place."""

from __future__ import annotations

import pytest

from muster.stream_ids import id_after, id_order, id_unix_s
from muster.types import group_id, job_and_index


@pytest.mark.parametrize("index", [0, 7, 99_999, 100_000, 9_999_999])
def test_the_name_of_a_group_tells_its_job_and_index(index: int) -> None:
    assert job_and_index(group_id("my-job-2", index)) == ("my-job-2", index)


@pytest.mark.parametrize(
    "name", ["", "job", "job-", "-1", "job-1x", "job-²", "job-١", "job-10000000", "job-1\n"]
)
def test_any_other_name_tells_nothing(name: str) -> None:
    """A larger index would make a bit field of any size."""
    assert job_and_index(name) is None


def test_ids_are_ordered_as_numbers() -> None:
    ids = ["9-0", "10-0", "10-2", "10-10", "10-11"]
    assert sorted(reversed(ids), key=id_order) == ids
    assert [id_after(id_) for id_ in ids] == ["9-1", "10-1", "10-3", "10-11", "10-12"]


def test_an_id_tells_its_time() -> None:
    assert id_unix_s("1700000000500-3") == 1_700_000_000.5
