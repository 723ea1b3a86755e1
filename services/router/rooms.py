"""Where there is room: the replicas' rows of conversations and their credits.

Owns: the rows, the credits, the room that a young conversation is given, which replica has news.
Promise: pure; a replica has room only on an unexpired credit; one without room is not looked at
again until something changes there. Does not cover: who goes on (seats.py), the rules (arms.py).
"""

from __future__ import annotations

from collections.abc import Callable

from services.router.arms import Arm
from services.router.credits import Credit
from services.router.growth import Growth
from services.router.programs import Row
from services.router.ranks import rank_of
from services.router.rules import RouterRules

_SHOWN = 4  # replicas of one text, beside the chosen one
Admits = Callable[[str, float], bool]
Why = Callable[[str, float], str]
"""For people: why a replica does not do something; "" when it does."""


class Rooms:
    """Of all replicas. `now`: steady seconds; `admits`: whether a replica takes turns at all,
    `welcomes`: whether it takes new conversations too."""

    def __init__(self, rules: RouterRules, arm: Arm, admits: Admits, welcomes: Admits):
        self._rules, self._arm = rules, arm
        self._admits, self._welcomes = admits, welcomes
        self._rank, self._growth = rank_of(arm.rank), Growth(rules.reserve_tokens)
        self._rows: dict[str, Row] = {}
        self._credits: dict[str, Credit] = {}
        self._changed: set[str] = set()  # replicas where somebody might go on
        self._roomy: set[str] = set()  # replicas that may have room for one more

    def has_room(self, now: float) -> bool:
        """Whether one more conversation may begin anywhere."""
        return bool(self._emptiest(now))

    def _emptiest(self, now: float, context: int = 0) -> str:
        """Of the replicas with room for one more, that with the least; "" when there is none.
        `context`: of that one, where it is more than a young one is given room for."""
        best, least = "", 0
        for replica in sorted(self._roomy):
            row = self._rows.get(replica)
            kv = self._kv(replica, now)
            if row is None or not kv or not self._arm.room(row, kv):
                self._roomy.discard(replica)  # until something changes there
            elif context > row.reserve and not self._arm.room(row, kv + row.reserve - context):
                continue
            elif (not best or row.reserved < least) and self._welcomes(replica, now):
                best, least = replica, row.reserved
        return best

    def _given(self, best: str) -> dict[str, float]:
        """Tokens given room on the replicas that may have any; that of `best` among them."""
        shown = {best, *sorted(self._roomy)[:_SHOWN]}
        return {replica: self._rows[replica].reserved for replica in sorted(shown)}

    @property
    def roomy(self) -> bool:
        """Whether anything has happened by which a new one might begin."""
        return bool(self._roomy)

    def _regrown(self) -> None:
        """Young conversations need another room than was thought."""
        for replica, row in self._rows.items():
            row.reserves(self._growth.tokens)
            self._roomy.add(replica)

    @property
    def reserve(self) -> int:
        """Tokens that a young conversation is given room for now."""
        return self._growth.tokens

    def why_no_room(self, now: float, why: Why) -> str:
        """For people: why no replica takes one more; "" when one does. `why`: what keeps a replica
        from new conversations beside its KV."""
        told = []
        for replica, row in sorted(self._rows.items()):
            kv, other = self._kv(replica, now), why(replica, now)
            if not other and kv and self._arm.room(row, kv):
                return ""
            if other:
                told.append(other)
                continue
            held = f", {len(row.held)} held" if row.held else ""
            told.append(f"{replica}: {row.load:,} of {kv:,.0f} tokens{held}")
        return "; ".join(told[:_SHOWN]) or "no replica has granted any"

    def _kv(self, replica: str, now: float) -> float:
        credit = self._credits.get(replica)
        return credit.left(now) if credit is not None else 0.0

    def _open(self, replica: str, now: float) -> float:
        """Tokens that turns may fill there now; 0 while it takes none."""
        return self._kv(replica, now) if self._admits(replica, now) else 0.0

    def _row(self, replica: str) -> Row:
        row = self._rows.get(replica)
        if row is None:
            row = self._rows[replica] = Row(self._rank, self._growth.tokens)
        return row

    def _news(self, replica: str) -> None:
        """Somebody might go on there, or begin."""
        self._changed.add(replica)
        self._roomy.add(replica)
