"""A root file system of a few programs of this machine, as a folder, for boxes to start from."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("bash", "env", "cat", "chmod", "cp", "ln", "ls", "mkdir", "mv", "rm", "sleep", "touch")


def make(folder: Path) -> Path:
    """Fill `folder`: /usr/bin with its libraries, links for a merged /usr, /etc; no /run, /tmp."""
    (folder / "usr" / "bin").mkdir(parents=True)
    (folder / "etc").mkdir()
    (folder / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    paths = [f"/usr/bin/{name}" for name in PROGRAMS]
    told = subprocess.run(["ldd", *paths], capture_output=True, check=True, text=True)
    for word in {*paths, *(word for word in told.stdout.split() if word.startswith("/"))}:
        name = word.removesuffix(":").lstrip("/")
        target = folder / (name if name.startswith("usr/") else f"usr/{name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copyfile(os.path.realpath("/" + name), target)
            target.chmod(0o755)
    return folder
