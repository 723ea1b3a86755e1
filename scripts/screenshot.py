"""A picture of a report page: `python scripts/screenshot.py PAGE.html OUT.png [WIDTH HEIGHT]`.

Needs a Chromium (`apt-get install chromium`). The browser gets no network and a folder of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_LIMIT_S = 120


def chromium() -> str | None:
    """Path of the browser, None without any."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def main(arguments: list[str]) -> int:
    """Exit status: 0, 1 when the browser failed, 2 for wrong use."""
    browser = chromium()
    if browser is None or len(arguments) not in (2, 4):
        sys.stderr.write(str(__doc__) if browser else "no Chromium: apt-get install chromium\n")
        return 2
    page, picture = (Path(a).resolve() for a in arguments[:2])
    width, height = arguments[2:] or ("1400", "1000")
    with tempfile.TemporaryDirectory(prefix="muster-shot-") as profile:
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *(f"--window-size={width},{height}", f"--screenshot={picture}"),
            *("--virtual-time-budget=3000", page.as_uri()),
        ]
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S)
    if done.returncode or not picture.exists():
        sys.stderr.buffer.write(done.stderr[-2000:])
        return 1
    sys.stderr.write(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
