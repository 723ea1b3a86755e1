"""Print constraints.txt: what the environment holds of muster-rl[cpu,dev], dependencies included.

Companions of torch are left out (set-up removes them), and so are build tags: `torch==2.13.0`
also allows 2.13.0+cpu, which an index of CPU builds carries.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REMOVED = {"torchvision", "torchaudio", "torchcodec"}


def closure() -> dict[str, str]:
    """Name → version of all that is needed and installed."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    reach = [("muster-rl", extra) for extra in ("", "cpu", "dev", "server")]
    while reach:
        name, extra = reach.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform
        found[name] = installed.version.partition("+")[0]
        for text in installed.requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                inner = canonicalize_name(need.name)
                reach += [(inner, ""), *((inner, e) for e in need.extras)]
    return found


if __name__ == "__main__":
    for name, version in sorted(closure().items()):
        if name not in REMOVED and name != "muster-rl":
            print(f"{name}=={version}")  # noqa: T201
