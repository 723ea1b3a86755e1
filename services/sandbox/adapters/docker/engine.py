"""The calls of the Docker Engine that the backend needs, each with a deadline.

Owns: the client. Promise: whatever goes wrong (engine away, late, refusing) is EngineTrouble, a
BoxFailure with its words; a thing that does not exist is Absent. Does not cover: when to try
again (boots.py).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiodocker import Docker, DockerError
from aiodocker.stream import Stream

from muster.types import Value
from services.sandbox.box import BoxFailure

_USUAL_S, _LONG_S = 30.0, 300.0
_GO_FOLDER, _GO_LINK = 1 << 31, 1 << 27  # of Go's os.FileMode
_GO_OTHER = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19  # device, pipe, socket, char, irregular
_LINES_KEPT, _LINE_MAX = 200, 500
Labels = dict[str, str]


class EngineTrouble(BoxFailure):
    """The engine could not do it; `status` is its HTTP status, 0 without an answer."""

    def __init__(self, problem: str, status: int = 0):
        self.status = status
        super().__init__(problem)


class Absent(EngineTrouble):
    """There is no such container, image or path."""


class PathStat(Value, frozen=True):
    """What lies at a path of a container; kind: file, folder, link or other."""

    kind: str
    size: int
    link: str


class Change(Value, frozen=True):
    """A path that differs from the image. kind: 0 changed, 1 added, 2 gone."""

    path: str
    kind: int


class Told(Value, frozen=True):
    """A build: its error, empty when it went well, and the last lines that it printed."""

    error: str
    lines: tuple[str, ...]


class Engine:
    """One engine; `docker` stays the caller's to close."""

    def __init__(self, docker: Docker):
        self._docker = docker

    @asynccontextmanager
    async def _asked(self, what: str, wait_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(wait_s):
                yield
        except TimeoutError as error:
            raise EngineTrouble(
                f"{what}: no answer of the Docker Engine in {wait_s:g} s"
            ) from error
        except DockerError as error:
            kind = Absent if error.status == 404 else EngineTrouble
            raise kind(f"{what}: {error.message}"[:2000], int(error.status)) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineTrouble(f"{what}: {error}"[:2000]) from error

    async def _json(
        self, what: str, path: str, method: str = "GET", *, wait_s: float = _USUAL_S, **more: Any
    ) -> Any:
        async with self._asked(what, wait_s):
            return await self._docker._query_json(path, method, **more)

    async def _done(
        self, what: str, path: str, method: str = "POST", *, wait_s: float = _USUAL_S, **more: Any
    ) -> None:
        async with self._asked(what, wait_s):
            response = await self._docker._do_query(path, method, **more)
            await response.read()
            response.release()

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._json("asking the engine", "info")
        return found

    async def create(self, name: str, config: dict[str, Any]) -> str:
        """The id of a new container."""
        made = await self._json(
            "creating a container", "containers/create", "POST", params={"name": name}, data=config
        )
        return str(made["Id"])

    async def start(self, container: str) -> None:
        await self._done("starting a container", f"containers/{container}/start")

    async def stop(self, container: str) -> None:
        """End every process of it, at once; returns when they have ended."""
        try:
            await self._done("killing a container", f"containers/{container}/kill")
        except EngineTrouble as error:
            if error.status != 409:  # not running: ended already
                raise
        await self._json("a container's end", f"containers/{container}/wait", "POST")

    async def remove(self, container: str) -> bool:
        """Kill and remove it; False when there was none."""
        params = {"force": True, "v": True}
        try:
            path = f"containers/{container}"
            await self._done("removing a container", path, "DELETE", params=params, wait_s=60.0)
        except Absent:
            return False
        except EngineTrouble as error:
            if error.status == 409 and "already in progress" in str(error):
                await self.gone(container)
                return True
            raise
        return True

    async def gone(self, container: str) -> None:
        """Wait until a removal that somebody else began has ended."""
        try:
            path, params = f"containers/{container}/wait", {"condition": "removed"}
            await self._json("a container's removal", path, "POST", params=params)
        except Absent:
            return

    async def pause(self, container: str) -> None:
        await self._done("pausing a container", f"containers/{container}/pause")

    async def unpause(self, container: str) -> None:
        await self._done("unpausing a container", f"containers/{container}/unpause")

    async def inspect(self, container: str, *, size: bool = False) -> dict[str, Any]:
        """With `size`: SizeRw, the bytes of its own files."""
        path, params = f"containers/{container}/json", {"size": size}
        found: dict[str, Any] = await self._json("inspecting a container", path, params=params)
        return found

    async def processes(self, container: str) -> int:
        """How many processes it has, as the engine sees them from outside."""
        path, params = f"containers/{container}/top", {"ps_args": "-eo pid"}
        found = await self._json("listing processes", path, params=params)
        return len(found["Processes"] or [])

    async def pids_limit(self, container: str, limit: int) -> None:
        path, data = f"containers/{container}/update", {"PidsLimit": limit}
        await self._json("updating a container", path, "POST", data=data)

    async def containers(self, label: str) -> list[dict[str, Any]]:
        """All that have the label (`name=value`), running or not."""
        params = {"all": True, "filters": json.dumps({"label": [label]})}
        found: list[dict[str, Any]] = await self._json(
            "listing containers", "containers/json", params=params
        )
        return found

    async def exec(self, container: str, call: list[str], user: str = "") -> tuple[str, Stream]:
        """Begin a process; its id, and its output, which the caller closes."""
        asked = {"AttachStdout": True, "AttachStderr": True, "Cmd": call, "User": user}
        path = f"containers/{container}/exec"
        made = await self._json("preparing a process", path, "POST", data=asked)
        stream = self._docker.containers.exec(made["Id"])
        stream._tty = False  # as asked above; the client would ask the engine for it
        output = stream.start()
        async with self._asked("starting a process", _USUAL_S):
            await output._init()
        return str(made["Id"]), output

    async def exec_state(self, process: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._json("inspecting a process", f"exec/{process}/json")
        return found

    async def changes(self, container: str) -> list[Change]:
        """What differs from its image, sorted by path.

        An engine without "native overlay diff" does not see a file rewritten with as many bytes
        within the second of its former time.
        """
        path = f"containers/{container}/changes"
        found = await self._json("listing changed files", path, wait_s=_LONG_S)
        listed = [Change(str(entry["Path"]), int(entry["Kind"])) for entry in found or []]
        return sorted(listed, key=lambda change: change.path)

    async def stat(self, container: str, path: str) -> PathStat | None:
        """What lies at `path`, whose last part is not followed; None when nothing does."""
        async with self._asked("looking at a file", _USUAL_S):
            # The client cannot: it reads an error from the body, and this answer has none.
            await self._docker._check_version()
            url = self._docker._canonicalize_url(f"containers/{container}/archive")
            async with self._docker.session.head(url, params={"path": path}) as response:
                if response.status == 404:
                    return None
                if response.status >= 400:
                    raise DockerError(response.status, f"{path}: {response.reason}")
                header = response.headers["X-Docker-Container-Path-Stat"]
        told = json.loads(base64.b64decode(header))
        mode = int(told["mode"])
        kind = "folder" if mode & _GO_FOLDER else "link" if mode & _GO_LINK else "file"
        kind = "other" if mode & _GO_OTHER else kind
        return PathStat(kind, int(told["size"]), str(told.get("linkTarget") or ""))

    async def archive(
        self,
        container: str,
        path: str,
        bytes_max: int,
        sink: io.BufferedIOBase,
        wait_s: float = _LONG_S,
    ) -> bool:
        """A tar of `path` into `sink`; False when it was cut at `bytes_max`."""
        async with self._asked("reading files", wait_s):
            url, params = f"containers/{container}/archive", {"path": path}
            response = await self._docker._do_query(url, "GET", params=params)
            try:
                left = bytes_max
                async for chunk in response.content.iter_any():
                    sink.write(chunk[:left])
                    left -= len(chunk)
                    if left < 0:
                        return False
                return True
            finally:
                response.close()

    async def put(self, container: str, folder: str, archive: Any, wait_s: float = _LONG_S) -> None:
        """Unpack a tar (bytes or an open file) below `folder`."""
        archive = io.BytesIO(archive) if isinstance(archive, bytes) else archive
        await self._done(
            "writing files", f"containers/{container}/archive", "PUT",
            params={"path": folder}, data=archive, wait_s=wait_s,
            headers={"Content-Type": "application/x-tar"},
        )  # fmt: skip

    async def commit(self, container: str, name: str, labels: Labels, *, pause: bool) -> str:
        """The id of a new image of its files."""
        repo, _, tag = name.partition(":")
        params = {"container": container, "repo": repo, "tag": tag, "pause": pause}
        made = await self._json(
            "committing a container", "commit", "POST", params=params, data={"Labels": labels},
            wait_s=_LONG_S,
        )  # fmt: skip
        return str(made["Id"])

    async def flatten(self, container: str, name: str, labels: Labels) -> None:
        """The files of a container as an image of one layer."""
        repo, _, tag = name.partition(":")
        async with self._asked("flattening an image", _LONG_S):
            source = await self._docker._do_query(f"containers/{container}/export", "GET")
            try:
                told = " ".join(f"{key}={value}" for key, value in labels.items())
                params = {"fromSrc": "-", "repo": repo, "tag": tag, "changes": f"LABEL {told}"}
                made = await self._docker._do_query(
                    "images/create", "POST", params=params, data=source.content.iter_any(),
                    headers={"Content-Type": "application/x-tar"},
                )  # fmt: skip
                said = await made.text()
                made.release()
            finally:
                source.close()
        if '"error"' in said:
            raise EngineTrouble(f"flattening an image: {said[-500:]}")

    async def image(self, name: str) -> dict[str, Any] | None:
        """What the engine knows of an image; None when it has none of that name."""
        try:
            found: dict[str, Any] = await self._json("inspecting an image", f"images/{name}/json")
        except Absent:
            return None
        return found

    async def images(self, label: str) -> list[dict[str, Any]]:
        params = {"filters": json.dumps({"label": [label]})}
        found: list[dict[str, Any]] = await self._json(
            "listing images", "images/json", params=params
        )
        return found

    async def remove_image(self, name: str) -> bool:
        """Remove it and the layers that nothing else uses; False when there was none."""
        try:
            await self._json("removing an image", f"images/{name}", "DELETE", wait_s=60.0)
        except Absent:
            return False
        return True

    async def build(self, context: bytes, params: dict[str, Any], timeout_s: float) -> Told:
        """Build an image from a tar; what the engine told of it."""
        lines: deque[str] = deque(maxlen=_LINES_KEPT)
        async with self._asked("building an image", timeout_s):
            response = await self._docker._do_query(
                "build", "POST", params=params, data=io.BytesIO(context),
                headers={"Content-Type": "application/x-tar"},
            )  # fmt: skip
            try:
                async for line in response.content:
                    told = json.loads(line) if line.strip() else {}
                    if "error" in told:
                        return Told(str(told["error"]), tuple(lines))
                    lines.append(str(told.get("stream", ""))[:_LINE_MAX])
            finally:
                response.close()
        return Told("", tuple(lines))
