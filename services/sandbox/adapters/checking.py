"""`--check-host`: can this host make boxes as its configuration asks?

Owns: which checks belong to which backend, the bases. Promise: the configuration is read as the
service reads it, so that what it would refuse is told here; nothing outlives the check. Does not
cover: what a native box needs of the kernel (native/hostcheck.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from muster.config import Config, load_config
from muster.errors import HostUnfit, MusterError
from services.sandbox import bases
from services.sandbox.adapters.native import basefolder, hostcheck
from services.sandbox.adapters.native.hostcheck import Finding
from services.sandbox.adapters.opening import open_backend
from services.sandbox.bases import BaseSetting, Kind
from services.sandbox.config import SandboxConfig, section

_STOP_S = 5.0


def main(config_path: Path | None) -> int:
    """Print what was found; 0 when boxes can be made, else 2."""
    try:
        config = load_config(config_path, os.environ)
        found = section(config)
        findings = asyncio.run(_check(config, found))
    except MusterError as error:
        print(f"sandbox: {error}", file=sys.stderr)  # noqa: T201 - the person's line
        return 2
    print("\n".join(hostcheck.told(findings, found.backend)))  # noqa: T201 - the answer
    return 0 if all(finding.well for finding in findings) else 2


async def _check(config: Config, found: SandboxConfig) -> list[Finding]:
    if found.backend == "fake":
        return [Finding("backend fake: answers are made up, no box is made", True)]
    if found.backend == "docker":
        return [await _docker(config, found)]
    settings = bases.read(found.bases, bases.NATIVE)
    return [*(of_base(*one) for one in settings.items()), *await hostcheck.check()]


async def _docker(config: Config, found: SandboxConfig) -> Finding:
    """Open the backend aside, as the service would: the engine, its images, a step in a box."""
    with tempfile.TemporaryDirectory(prefix="muster-check-") as folder:
        aside = found.model_copy(update={"runtime_dir": Path(folder)})
        try:
            async with open_backend(config, aside, stop_s=_STOP_S) as (_, known):
                images = ", ".join(known.patterns) or "none: set sandbox.bases"
                return Finding(f"Docker Engine: a step ran in a container; images: {images}", True)
        except HostUnfit as failure:
            return Finding(f"Docker Engine: {failure.problem}", False, failure.way_out)


def of_base(pattern: str, setting: BaseSetting) -> Finding:
    """Whether what a pattern stands for is there. Tarballs are not unpacked for that."""
    what = f'base "{pattern}": {setting.where or setting.kind}'
    path = Path(setting.where)
    if setting.kind is Kind.TARBALL and not path.is_file():
        return Finding(f"{what} is no file", False, "name a tarball of a root file system")
    if setting.kind is Kind.FOLDER:
        if not path.is_dir():
            return Finding(f"{what} is no folder", False, "name a folder with a root file system")
        if problem := basefolder.trouble(str(path)):
            return Finding(f"{what}: {problem}", False, "add it to the folder")
    return Finding(what, True)
