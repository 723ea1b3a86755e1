"""The control of bench.bank: a gRPC server that streams ready bytes, and nothing else.

    python -m bench._bare_stream SIZES...     files with one message size a line; prints its port

A request is the number of a file, from 0; the answer is as many messages as it has lines.
Same library and options as the bank's server, no Redis, no unpacking, no protobuf.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from muster.rpc import MESSAGE_BYTES_MAX

METHOD = "/bare/Stream"


async def _serve(streams: list[list[int]]) -> None:
    longest = b"\x5a" * max(max(sizes) for sizes in streams)

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for size in streams[int(request)]:
            yield longest[:size]

    handler: Any = grpc.unary_stream_rpc_method_handler(stream)
    generic = grpc.method_handlers_generic_handler("bare", {"Stream": handler})
    server = grpc.aio.server(options=[("grpc.max_send_message_length", MESSAGE_BYTES_MAX)])
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    files = [Path(name).read_text().split() for name in sys.argv[1:]]
    asyncio.run(_serve([[int(line) for line in lines] for lines in files]))
