"""A paged KV cache with prefix sharing, kept as runs of blocks instead of block by block.

Owns: which blocks are held, idle or blank, and what a request finds cached. Promise: equal to
vLLM V1's block pool, block for block (tests hold it against a block-by-block oracle and against
the real engine):
- only full blocks are cached and matched, and the last token of a prompt is always recomputed, so
  a wholly cached prompt of an exact multiple of the block loses one block; a recomputed block is a
  copy of its own, and of several copies the one cached first is found;
- held blocks are counted per holder; when the last lets go, full blocks go to the end of an LRU,
  the tail of the sequence before its head, and blocks without full content become blank;
- blank blocks are taken first, then the least recently freed.
An operation costs about as much as the number of runs that it touches; a run of blocks is split
when a part of it is held and merged when freed together.
Does not cover: time, and who may start (engine.py).
"""

from __future__ import annotations

from collections.abc import Hashable

from muster.errors import InvalidInput, Refused
from sim.rollout.chain import Chain, Run


class _Piece:
    """Blocks [low, high) of one run of a chain, held by the same requests or idle together."""

    __slots__ = ("after", "before", "high", "low", "refs", "rest", "run", "serial")

    def __init__(self, run: _Blocks | None, low: int, high: int, refs: int, serial: int):
        self.run, self.low, self.high, self.refs, self.serial = run, low, high, refs, serial
        self.before: _Piece = self  # neighbours in the LRU while idle
        self.after: _Piece = self
        self.rest: _Piece | None = None  # what was split off above


class _Blocks:
    """The cached blocks of one run; `count` includes copies."""

    __slots__ = ("count", "first", "key", "pieces")

    def __init__(self, key: Hashable, first: int):
        self.key, self.first = key, first
        self.pieces: list[_Piece] = []
        self.count = 0


class Hold:
    """What one request holds: `blocks` in all, the first `full` of them with full content."""

    __slots__ = ("blocks", "cached_tokens", "chain", "full", "parts")

    def __init__(self, chain: Chain, cached_tokens: int, blocks: int, full: int):
        self.chain, self.cached_tokens, self.blocks, self.full = chain, cached_tokens, blocks, full
        self.parts: list[tuple[_Piece, int]] = []  # (first piece, block where the part ends)


_Found = list[tuple[_Piece, int]]


class PrefixCache:
    """`tokens` of KV in blocks of `block` tokens; what does not fill a block is lost."""

    def __init__(self, tokens: int, block: int):
        if block < 1 or tokens < block:
            raise InvalidInput(
                "a cache of less than one block",
                field="tokens",
                value=tokens,
                way_out=f"give at least block = {block} tokens",
            )
        self.block = block
        self.total = tokens // block
        self.used = 0
        self.evicted = 0  # blocks with content that gave way, ever
        self._blank = self.total
        self._runs: dict[Hashable, _Blocks] = {}
        self._lru = _Piece(None, 0, 0, 0, 0)  # sentinel: `after` is the least recently freed
        self._serial = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds, with content or without."""
        return self.total - self.used

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block)

    def match(self, chain: Chain, tokens: int | None = None) -> int:
        """Tokens that a prompt of the chain's first `tokens` (default all) would find cached."""
        length = chain.tokens if tokens is None else tokens
        found, _ = self._find(chain, (length - 1) // self.block)
        return found[-1][1] * self.block if found else 0

    def admit(self, chain: Chain, tokens: int | None = None, spare: int = 0) -> Hold | None:
        """Hold blocks for a prompt of the chain's first `tokens`, those that are cached and new
        ones; None, and nothing changed, when fewer than `spare` blocks would stay free."""
        length = chain.tokens if tokens is None else tokens
        found, held = self._find(chain, (length - 1) // self.block)
        blocks = -(-length // self.block)
        if blocks - held + spare > self.total - self.used:
            return None
        full = found[-1][1] if found else 0
        hold = Hold(chain, full * self.block, blocks, full)
        self._touch(hold, found)
        self._take(blocks - full)
        return hold

    def grow(self, hold: Hold, tokens: int) -> bool:
        """Let it have blocks for `tokens` in all; False, and nothing changed, if they are not
        free."""
        blocks = -(-tokens // self.block)
        more = blocks - hold.blocks
        if more <= 0:
            return True
        if not self.reserve(more):
            return False
        hold.blocks = blocks
        return True

    def reserve(self, blocks: int) -> bool:
        """Take free blocks for a holder that `assign` names later; False if there are fewer."""
        if blocks > self.total - self.used:
            return False
        self._take(blocks)
        return True

    def assign(self, hold: Hold, tokens: int) -> None:
        """The holder has blocks for `tokens` now; those it had not are `reserve`d ones."""
        blocks = -(-tokens // self.block)
        if blocks > hold.blocks:
            hold.blocks = blocks

    def fill(self, hold: Hold, tokens: int) -> None:
        """The KV of the first `tokens` is computed: their full blocks can be found from now on."""
        full = tokens // self.block
        if full <= hold.full:
            return
        if full > hold.blocks:
            raise Refused(
                "more content than blocks", field="tokens", value=tokens, way_out="grow it first"
            )
        runs = hold.chain.runs
        for number, run in enumerate(runs):
            end = full if number == len(runs) - 1 else min(full, run.end // self.block)
            if hold.full < end:
                self._add(hold, run, hold.full, end)
                hold.full = end

    def release(self, hold: Hold) -> None:
        """Let go of everything; the tail is the first to be evicted."""
        self.used -= hold.blocks - hold.full
        self._blank += hold.blocks - hold.full
        for piece, end in reversed(hold.parts):
            if piece.high >= end:
                self._drop(piece)
                continue
            pieces = [piece]
            while pieces[-1].high < end:
                rest = pieces[-1].rest
                assert rest is not None, "a part ends in its pieces"
                pieces.append(rest)
            for each in reversed(pieces):
                self._drop(each)
        hold.parts, hold.blocks, hold.full = [], 0, 0

    def clear(self) -> None:
        """Forget all content. Only when nothing is held, as in vLLM: let go of it first."""
        if self.used:
            raise Refused(
                "requests hold blocks",
                field="used",
                value=self.used,
                way_out="release every hold before the clear",
            )
        self._runs.clear()
        self._lru.before = self._lru.after = self._lru
        self._blank = self.total

    def _find(self, chain: Chain, limit: int) -> tuple[_Found, int]:
        """The cached parts from the start up to block `limit`, and how many of it are held."""
        found: _Found = []
        at = held = 0
        runs, last = chain.runs, len(chain.runs) - 1
        for number, run in enumerate(runs):
            stop = limit if number == last else min(limit, run.end // self.block)
            if at >= stop:
                if at >= limit:
                    break
                continue
            blocks = self._runs.get(run.key)
            if blocks is None:
                break
            while at < stop:
                piece, end = _covering(blocks.pieces, at, stop)
                if piece is None:
                    return found, held
                if piece.refs:
                    held += end - at
                found.append((piece, end))
                at = end
        return found, held

    def _touch(self, hold: Hold, found: _Found) -> None:
        at = 0
        for piece, end in found:
            part = piece
            if part.low < at:
                part = self._split(part, at)
            if part.high > end:
                self._split(part, end)
            if part.refs == 0:
                _unlink(part)
                self.used += end - at
            part.refs += 1
            hold.parts.append((part, end))
            at = end

    def _split(self, piece: _Piece, at: int) -> _Piece:
        """Cut it: the piece keeps [low, at); the new one, which is evicted before it, the rest."""
        upper = _Piece(piece.run, at, piece.high, piece.refs, piece.serial)
        upper.rest, piece.rest, piece.high = piece.rest, upper, at
        assert piece.run is not None
        piece.run.pieces.append(upper)
        if piece.refs == 0:
            _link(upper, piece.before)
        return upper

    def _add(self, hold: Hold, run: Run, low: int, high: int) -> None:
        """Newly full blocks of one run: a longer last piece, or a new one."""
        blocks = self._runs.get(run.key)
        if blocks is None:
            blocks = self._runs[run.key] = _Blocks(run.key, run.start // self.block)
        blocks.count += high - low
        last = _last(hold)
        if last is not None and last.run is blocks and last.high == low and last.refs == 1:
            # Only the highest may grow: others' blocks up there were cached before these.
            if all(piece.high <= low for piece in blocks.pieces):
                last.high = high
                hold.parts[-1] = (hold.parts[-1][0], high)
                return
        self._serial += 1
        piece = _Piece(blocks, low, high, 1, self._serial)
        blocks.pieces.append(piece)
        hold.parts.append((piece, high))

    def _drop(self, piece: _Piece) -> None:
        piece.refs -= 1
        if piece.refs:
            return
        self.used -= piece.high - piece.low
        newest, run = self._lru.before, piece.run
        assert run is not None
        # Heads are freed after tails, so the newest of the same run is its upper neighbour, evicted
        # right before it: one piece. Not while there are copies: merging forgets which was first.
        if newest.run is run and _single(run):
            newest.low = piece.low
            run.pieces.remove(piece)
        else:
            _link(piece, newest)

    def _take(self, count: int) -> None:
        """Hand out free blocks: blank ones, then the least recently freed."""
        self.used += count
        if count <= self._blank:
            self._blank -= count
            return
        count -= self._blank
        self._blank = 0
        self.evicted += count
        while count:
            oldest = self._lru.after
            run = oldest.run
            assert run is not None, "the caller looked whether there are enough"
            size = oldest.high - oldest.low
            if size > count:
                oldest.high -= count
                run.count -= count
                return
            count -= size
            run.count -= size
            _unlink(oldest)
            run.pieces.remove(oldest)
            if not run.pieces:
                del self._runs[run.key]


def _covering(pieces: list[_Piece], at: int, stop: int) -> tuple[_Piece | None, int]:
    """The piece cached first that has block `at`, and how far it stays the one."""
    best: _Piece | None = None
    for piece in pieces:
        if piece.low <= at < piece.high and (best is None or piece.serial < best.serial):
            best = piece
    if best is None:
        return None, at
    # What was cached before it above has, from the same request, a copy of `at` cached before.
    return best, min(best.high, stop)


def _last(hold: Hold) -> _Piece | None:
    """The piece with the highest block that it holds."""
    if not hold.parts:
        return None
    piece, end = hold.parts[-1]
    while piece.high < end:
        assert piece.rest is not None, "a part ends in its pieces"
        piece = piece.rest
    return piece


def _single(run: _Blocks) -> bool:
    """Is there one copy of every block? Content has no holes: heads outlive tails."""
    return run.count == max(piece.high for piece in run.pieces) - run.first


def _link(piece: _Piece, before: _Piece) -> None:
    piece.before, piece.after = before, before.after
    before.after.before = piece
    before.after = piece


def _unlink(piece: _Piece) -> None:
    piece.before.after, piece.after.before = piece.after, piece.before
