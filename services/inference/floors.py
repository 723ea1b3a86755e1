"""The oldest version in the KV that running requests attend to.

Owns: that figure, per request and version, and the salt that keeps others from such KV. Promise:
pure; never too new: a request that may have kept KV of a version says so. Does not cover: which
version sampled a token (the engine's labels).
"""

from __future__ import annotations


class Floors:
    """`version`: the one served. `salt`: of new prompts; requests of equal salt may share KV. It
    changes only where KV is kept: KV that is computed again may be found by the next turn.

    A request is named from its submission to its end.
    """

    def __init__(self, version: int = 0):
        self.version, self.salt = version, 0
        self._live: dict[str, dict[int, int]] = {}  # version → oldest in the KV meanwhile

    def begun(self, name: str) -> None:
        """A request was submitted."""
        self._live[name] = {self.version: self.version}

    def committed(self, version: int, *, kept: bool) -> None:
        """Other weights are served; the KV of running requests was kept, or is computed again."""
        for floors in self._live.values():
            floors[version] = floors[self.version] if kept else version
        self.version = version
        self.salt += kept

    def ended(self, name: str) -> dict[int, int]:
        """A request is over: for each version that it lived under, the oldest in its KV."""
        return self._live.pop(name, {})
