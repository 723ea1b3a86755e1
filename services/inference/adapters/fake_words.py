"""What a fake engine says, in the words of a model folder's tokenizer. For tests of others.

Promise: deterministic: prompt and seed decide; about half of the replies are one shell command,
which no other prompt and seed gives, a few are nothing that can be read, the rest say DONE. Needs
`tokenizers` alone: no model, no torch. Does not cover: what the commands do (the boxes).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

from services.inference.engine import Sampling

Speak = Callable[[Sampling], tuple[int, ...]]
"""The tokens of a reply, without what ends it."""
# Of 256 replies so many are of each kind, in this order; {} is of the reply alone.
_REPLIES = (
    (90, "```bash\necho {} >> log.txt\n```"),
    (40, "```bash\necho {} > answer.txt; cat answer.txt\n```"),
    (20, "```bash\ncat missing-{}.txt\n```"),
    (6, "I would say {}."),
    (100, "DONE"),
)


def reply(prompt: tuple[int, ...], seed: int) -> str:
    """The text of a reply."""
    packed = struct.pack(f"<Q{len(prompt)}i", seed & (1 << 64) - 1, *prompt)
    digest = hashlib.sha256(packed).digest()
    left = digest[0]
    for share, text in _REPLIES:
        if left < share:
            return text.format(digest[1:7].hex())
        left -= share
    raise AssertionError("the shares add up to 256")


def words_of(folder: Path) -> Speak | None:
    """Speaks with the tokenizer of `folder`; None when that has no tokenizer that can be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - the library raises nothing narrower
        return None
    tokenizer.encode_special_tokens = True

    def speak(request: Sampling) -> tuple[int, ...]:
        text = reply(request.prompt, request.params.seed)
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return speak
