"""Where replicas and hosts are, and the channels to them.

Owns: the announced addresses, the open channels. Promise: a peer whose entry is gone keeps its
channel, and the calls on it, for a while: an absent entry is no proof that it left. Does not cover:
what is called (replicas.py, calls.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from muster import rpc
from muster.errors import Unavailable

_KEEP_S = 300.0  # how long an address outlives its announcement


class Channels:
    """By id of a replica or host."""

    def __init__(self) -> None:
        self._open: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, Any] = {}  # by address; a stub costs as much as a call
        self.addresses: dict[str, str] = {}
        self._gone_since: dict[str, float] = {}  # of ids that are no longer announced

    async def close(self) -> None:
        for channel in self._open.values():
            await channel.close()

    def addresses_are(self, addresses: Mapping[str, str], now: float) -> list[grpc.aio.Channel]:
        """Take the announced addresses; answers the channels that nobody needs any more."""
        self.addresses |= addresses
        gone = self.addresses.keys() - addresses.keys()
        self._gone_since = {id_: self._gone_since.get(id_, now) for id_ in gone}
        for id_, since in self._gone_since.items():
            if now - since > _KEEP_S:
                del self.addresses[id_]
        unused = self._open.keys() - self.addresses.values()
        for address in unused:
            self._stubs.pop(address, None)
        return [self._open.pop(address) for address in unused]

    def stub(self, id_: str, kind: Callable[[grpc.aio.Channel], Any]) -> Any:
        """The stub of that kind to a peer, the only kind asked of its address. Raises as `to`."""
        channel = self.to(id_)
        address = self.addresses[id_]
        if address not in self._stubs:
            self._stubs[address] = kind(channel)
        return self._stubs[address]

    def to(self, id_: str) -> grpc.aio.Channel:
        """Raises Unavailable for one that is not known."""
        address = self.addresses.get(id_)
        if address is None:
            raise Unavailable(
                f"{id_} is no longer announced", field="address", way_out="another one is chosen"
            )
        if address not in self._open:
            self._open[address] = rpc.open_channel(address)
        return self._open[address]
