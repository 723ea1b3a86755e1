"""Every expected failure says what to change."""

from __future__ import annotations

import grpc
import pytest

from muster import errors

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]


def test_a_message_names_field_value_problem_and_way_out() -> None:
    error = errors.InvalidInput("is too small", field="group_size", value=1, way_out="use 2")
    assert str(error) == "group_size = '1': is too small → use 2"


def test_a_message_without_a_field_is_only_the_problem() -> None:
    assert str(errors.Unavailable("gone")) == "gone"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_grpc_status(kind: type[errors.MusterError]) -> None:
    assert kind.code in grpc.StatusCode.__members__


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_stands_in_the_drawn_tree(kind: type[errors.MusterError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
