"""For the tests of all folders: a Docker Engine, started when the first of them asks for it, and
properties that are not timed: how long an example takes is the machine's affair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.integration.docker_engine import Engine

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Skips, with the reason, where no engine can be had."""
    from tests.integration.docker_engine import NoEngine, engine

    try:
        with engine(tmp_path_factory.mktemp("docker")) as found:
            yield found
    except NoEngine as reason:
        pytest.skip(str(reason))
