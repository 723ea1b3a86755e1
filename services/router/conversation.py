"""The tokens of one episode: append-only, never decoded and encoded again.

Owns: the context that the engine sees and the segments that are trained. Promise: the chat
template is applied once, to the opening; a later turn appends template glue and observation
tokens, so every context extends the former one and trained tokens are the sampled ones. Where a
template cannot be extended so (checked at each turn), the chat is rendered anew and a new PROMPT
segment says so. What a box printed is encoded as plain text: it can never become a special token.
Does not cover: who samples (driver.py), the words (chat.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from muster.types import Segment, SegmentKind, VersionSpan
from services.router.carriers import Message

# Stands for the observation while the template is rendered; private-use, so no text has it.
_SENTINEL = "\ue000muster\ue001"


class ChatCodec(Protocol):
    """Tokenizer and chat template of one model folder."""

    stop_ids: tuple[int, ...]

    def render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        """The chat as text, ending where the assistant speaks when `generate`."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text; with `special` False, markup in it is ordinary text."""
        ...

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of sampled ids, without special tokens."""
        ...


class Conversation:
    """Context and segments of one attempt."""

    def __init__(self, codec: ChatCodec):
        self._codec = codec
        self._messages: tuple[Message, ...] = ()
        self._context: list[int] = []
        self._pending: list[Segment] = []  # of the turn that is not recorded yet

    @property
    def context(self) -> list[int]:
        """Ids that the next request sends, shape [n]."""
        return list(self._context)

    def open(self, messages: tuple[Message, ...]) -> None:
        """Turn 0: the template, applied once."""
        if self._context:
            raise ValueError("the conversation is already open")
        self._messages = messages
        self._prompt()

    def observe(self, message: Message) -> None:
        """A later turn: glue and observation appended after what was sampled."""
        extended = (*self._messages, message)
        glue = self._glue(message.role)
        self._messages = extended
        if glue is None:
            self._prompt()
            return
        before, after = (self._codec.encode(part, special=True) for part in glue)
        if self._context and self._context[-1] in self._codec.stop_ids and before:
            # The model closed its own turn: the template's closing token is already there.
            before = before[1:] if before[0] == self._context[-1] else before
        ids = [*before, *self._codec.encode(message.text, special=False), *after]
        self._append(Segment(SegmentKind.OBSERVATION, tuple(ids)))

    def reply(
        self,
        ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        spans: tuple[VersionSpan, ...],
    ) -> str:
        """What the engine sampled, kept as it is; answers its text."""
        text = self._codec.decode(ids)
        self._messages = (*self._messages, Message("assistant", text))
        if ids:
            self._append(Segment(SegmentKind.MODEL, ids, logprobs, spans))
        return text

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
            for segment in segments:
                if segment.kind is SegmentKind.PROMPT:
                    self._context = []
                self._append(segment)
            sampled = [i for s in segments if s.kind is SegmentKind.MODEL for i in s.token_ids]
            said = Message("assistant", self._codec.decode(tuple(sampled)))
            self._messages = (*self._messages, said, *answers[number : number + 1])
        self._pending = []

    def take_segments(self) -> tuple[Segment, ...]:
        """Segments since the last call: those of the turn being recorded."""
        taken, self._pending = tuple(self._pending), []
        return taken

    def _prompt(self) -> None:
        """Render the whole chat; only the template's own markup may become special tokens."""
        marks = [f"{_SENTINEL}{i}." for i in range(len(self._messages))]
        marked = tuple(Message(m.role, k) for m, k in zip(self._messages, marks, strict=True))
        rest, ids = self._codec.render(marked, generate=True), list[int]()
        for message, mark in zip(self._messages, marks, strict=True):
            glue, found, tail = rest.partition(mark)
            if not found:
                continue  # the template leaves this message out
            ids += self._codec.encode(glue, special=True)
            ids += self._codec.encode(message.text, special=False)
            rest = tail
        ids += self._codec.encode(rest, special=True)
        self._context = []
        self._append(Segment(SegmentKind.PROMPT, tuple(ids)))

    def _append(self, segment: Segment) -> None:
        self._context += segment.token_ids
        self._pending.append(segment)

    def _glue(self, role: str) -> tuple[str, str] | None:
        """Template text between a reply and the message after it, and after that message."""
        base = (Message("user", "x"), Message("assistant", "y"))
        closed = self._codec.render(base, generate=False)
        longer = self._codec.render((*base, Message(role, _SENTINEL)), generate=True)
        spoken = closed.rfind("y")
        if not longer.startswith(closed[: spoken + 1]) or _SENTINEL not in longer:
            return None
        before, _, after = longer[spoken + 1 :].partition(_SENTINEL)
        return before, after
