"""The tokens of one episode: append-only, never decoded and encoded again.

Owns: the context that the engine sees and the segments that are trained. Promise: the chat
template is applied once, to the opening; a later turn appends template glue and observation
tokens, so every context extends the former one and trained tokens are the sampled ones. Where a
template cannot be extended so (checked once for a role), the chat is rendered anew and a new PROMPT
segment says so. What a box printed is encoded as plain text: it can never become a special token.
Does not cover: who samples (driver.py), the words (chat.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from muster.types import Segment, SegmentKind, Value, VersionSpan
from services.router.blocks import BlockChain
from services.router.carriers import Message
from services.router.context import Context, Parts, pack
from services.router.told import NOTHING, Told, routed, routing_bytes

# Stands for the observation while the template is rendered; private-use, so no text has it.
_SENTINEL = "\ue000muster\ue001"


class ChatCodec(Protocol):
    """Tokenizer and chat template of one model folder."""

    stop_ids: tuple[int, ...]

    def __hash__(self) -> int:
        """What a template makes of a role is kept for each codec."""
        ...

    def render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        """The chat as text, ending where the assistant speaks when `generate`."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text; with `special` False, markup in it is ordinary text."""
        ...

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of sampled ids, without special tokens."""
        ...


class Opening(Value, frozen=True):
    """An opening as tokens: one object for all siblings of a group.

    `packed`: the ids as they are sent; `blocks`: chain hashes of their whole blocks.
    """

    ids: tuple[int, ...]
    packed: bytes
    blocks: tuple[int, ...]


def opening_of(codec: ChatCodec, messages: tuple[Message, ...], block_tokens: int) -> Opening:
    """What `Conversation.open` makes of them."""
    ids = rendered(codec, messages)
    context = Context(pack(ids))
    return Opening(ids, context.packed(), tuple(BlockChain(block_tokens).extend(context, len(ids))))


class Conversation:
    """Context and segments of one attempt."""

    routing_bytes_max = 24 << 20
    """Of all its turns: with its tokens it has to fit one message. More is left out."""

    def __init__(self, codec: ChatCodec, block_tokens: int = 128):
        """block_tokens: of the router's index of cached prefixes."""
        self._codec, self._block_tokens = codec, block_tokens
        self._chain = BlockChain(block_tokens)
        self._messages: tuple[Message, ...] = ()
        self._context = Context()
        self._pending: list[Segment] = []  # of the turn that is not recorded yet
        self._routing_bytes = 0  # of the turns that are

    @property
    def context(self) -> list[int]:
        """Ids that the next request sends, shape [n]."""
        return self._context.ids()

    @property
    def packed(self) -> bytes:
        """The same, packed as codec.pack_ids does it."""
        return self._context.packed()

    @property
    def parts(self) -> Parts:
        """The same, not copied."""
        return self._context.parts()

    def __len__(self) -> int:
        """Tokens of the context."""
        return len(self._context)

    @property
    def recorded(self) -> int:
        """Tokens of its turns that are recorded, or left behind: a prefix of the context."""
        return len(self._context) - sum(len(s.token_ids) for s in self._pending[self._anew() :])

    @property
    def boundary(self) -> tuple[int, int]:
        """What a cache has of it after the newest reply: chain hash of its last whole block, and
        the tokens up to its end. The last token is computed only by the next request."""
        self._chain.extend(self._context, max(0, len(self._context) - 1))
        return self._chain.name, self._chain.tokens

    def open(self, messages: tuple[Message, ...], opening: Opening | None = None) -> None:
        """Turn 0: the template, applied once; `opening`: what `opening_of` made of them."""
        if self._context:
            raise ValueError("the conversation is already open")
        self._messages = messages
        if opening is None:
            self._prompt()
            return
        self._begin_anew(opening.packed)
        if opening.blocks:
            self._chain.begin(opening.blocks[-1], len(opening.blocks))
        self._pending.append(Segment(SegmentKind.PROMPT, opening.ids))

    def observe(self, message: Message, encoded: list[int] | None = None) -> None:
        """A later turn: glue and observation appended after what was sampled.

        encoded: what the codec makes of the text, when somebody has asked before.
        """
        extended = (*self._messages, message)
        glue = _glue(self._codec, message.role)
        self._messages = extended
        if glue is None:
            self._prompt()
            return
        before, after = glue
        last = self._context.last
        if last in self._codec.stop_ids and before:
            # The model closed its own turn: the template's closing token is already there.
            before = before[1:] if before[0] == last else before
        if encoded is None:
            encoded = self._codec.encode(message.text, special=False)
        self._append(Segment(SegmentKind.OBSERVATION, (*before, *encoded, *after)))

    def reply(
        self,
        ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        spans: tuple[VersionSpan, ...],
        told: Told = NOTHING,
    ) -> str:
        """What the engine sampled, kept as it is; answers its text."""
        text = self._codec.decode(ids)
        self._messages = (*self._messages, Message("assistant", text))
        if ids:
            self._append(Segment(SegmentKind.MODEL, ids, logprobs, spans, mask=told.mask))
        if told.experts is not None:
            self._route(told)
        return text

    def _route(self, told: Told) -> None:
        anew = self._anew()
        found = self._pending[:anew] + routed(self._pending[anew:], self.recorded, told)
        if self._routing_bytes + routing_bytes(found) <= self.routing_bytes_max:
            self._pending = found

    def _anew(self) -> int:
        """Which of the turn's segments the present context begins or goes on with."""
        kinds = [segment.kind for segment in self._pending]
        return max((n for n, kind in enumerate(kinds) if kind is SegmentKind.PROMPT), default=0)

    def take_back(self) -> None:
        """Forget the newest reply: nobody heard it, and its turn is asked for again elsewhere."""
        if not self._messages or self._messages[-1].role != "assistant":
            return
        self._messages = self._messages[:-1]
        if self._pending and self._pending[-1].kind is SegmentKind.MODEL:
            segment = self._pending.pop()
            self._context.cut(len(segment.token_ids))
            if len(self._context) < self._chain.tokens:
                self._chain = BlockChain(self._block_tokens)

    def restore(
        self,
        opening: tuple[Message, ...],
        turns: Sequence[Sequence[Segment]],
        answers: Sequence[Message],
    ) -> None:
        """Be as after these recorded turns; `answers`: what followed each of them but the last."""
        if self._context:
            raise ValueError("the conversation is already open")
        self._messages = opening
        for number, segments in enumerate(turns):
            self._routing_bytes += routing_bytes(segments)
            for segment in segments:
                if segment.kind is SegmentKind.PROMPT:
                    self._begin_anew()
                self._append(segment)
            sampled = [i for s in segments if s.kind is SegmentKind.MODEL for i in s.token_ids]
            said = Message("assistant", self._codec.decode(tuple(sampled)))
            self._messages = (*self._messages, said, *answers[number : number + 1])
        self._pending = []

    def take_segments(self) -> tuple[Segment, ...]:
        """Segments since the last call: those of the turn being recorded."""
        taken, self._pending = tuple(self._pending), []
        self._routing_bytes += routing_bytes(taken)
        return taken

    def _prompt(self) -> None:
        """Render the whole chat."""
        ids = rendered(self._codec, self._messages)
        self._begin_anew()
        self._append(Segment(SegmentKind.PROMPT, ids))

    def _begin_anew(self, head: bytes = b"") -> None:
        self._context, self._chain = Context(head), BlockChain(self._block_tokens)

    def _append(self, segment: Segment) -> None:
        self._context.extend(segment.token_ids)
        self._pending.append(segment)


@lru_cache(maxsize=16)
def _glue(codec: ChatCodec, role: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The template between a reply and the message after it, and after that message: as ids.

    None when it cannot be extended. Kept, for it depends on nothing else.
    """
    base = (Message("user", "x"), Message("assistant", "y"))
    closed = codec.render(base, generate=False)
    longer = codec.render((*base, Message(role, _SENTINEL)), generate=True)
    spoken = closed.rfind("y")
    if not longer.startswith(closed[: spoken + 1]) or _SENTINEL not in longer:
        return None
    before, _, after = longer[spoken + 1 :].partition(_SENTINEL)
    return tuple(codec.encode(before, special=True)), tuple(codec.encode(after, special=True))


def rendered(codec: ChatCodec, messages: tuple[Message, ...]) -> tuple[int, ...]:
    """Ids of a whole chat; only the template's own markup may become special tokens."""
    marks = [f"{_SENTINEL}{i}." for i in range(len(messages))]
    marked = tuple(Message(m.role, k) for m, k in zip(messages, marks, strict=True))
    rest, ids = codec.render(marked, generate=True), list[int]()
    for message, mark in zip(messages, marks, strict=True):
        glue, found, tail = rest.partition(mark)
        if not found:
            continue  # the template leaves this message out
        ids += codec.encode(glue, special=True)
        ids += codec.encode(message.text, special=False)
        rest = tail
    return (*ids, *codec.encode(rest, special=True))
