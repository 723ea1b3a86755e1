"""What a checkpoint of another trainer says of its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.bank import AsyncBankClient
from muster.errors import Refused
from muster.publish import AsyncPublisher
from tests.integration.test_external_trainer import World, load, nudge, save
from tests.integration.test_external_trainer import model as model
from tests.integration.test_external_trainer import world as world

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.timeout(240)]


async def test_a_checkpoint_acknowledged_before_its_weights_were_published_is_not_resumed(
    world: World, tmp_path: Path
) -> None:
    await world.replica("one")
    await world.groups("g-0")
    trained = load(world.model)
    async with AsyncBankClient(**world.where) as bank, AsyncPublisher(trained, bank):
        batch = await bank.lease()
        nudge(trained)
        folder = save(trained, tmp_path / "step-1")
        await bank.acknowledge(batch, folder)  # and the process ends before it publishes
    async with AsyncBankClient(**world.where, resume=folder) as bank:
        with pytest.raises(Refused, match="publish before you acknowledge"):
            async with AsyncPublisher(load(folder), bank):
                pass


async def test_a_checkpoint_that_is_finished_late_is_of_the_version_of_its_step(
    world: World, tmp_path: Path
) -> None:
    await world.replica("one")
    await world.groups("g-0", "g-1")
    trained = load(world.model)
    async with AsyncBankClient(**world.where) as bank, AsyncPublisher(trained, bank) as publisher:
        batches = [await bank.lease(), await bank.lease()]
        for batch in batches:
            nudge(trained)
            await publisher.publish(step=batch.step)
        state = bank.state(batches[0])
        assert (state.step, state.version, state.parent) == (1, 1, 0)
        assert state.digest != bank.state(batches[1]).digest == publisher.digest
