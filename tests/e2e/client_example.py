import asyncio
import sys

from muster.client import MusterClient


async def main(address: str, tasks: str) -> None:
    async with MusterClient(address) as client:
        job = await client.submit(tasks, groups=1, group_size=2)
        async for progress in client.watch(job):
            print(progress.groups_complete, progress.episodes_finished, progress.turns)  # noqa: T201


asyncio.run(main(*sys.argv[1:]))
