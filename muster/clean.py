"""Untrusted text made fit to be shown: on a terminal, in a log, on a page.

Owns: which characters are shown as escapes, which text is a secret. Promise: pure and total; the
result holds no character that a terminal obeys (C0, C1, DEL), none that reorders or hides text
(bidi, zero width, tags), no lone surrogate, and none of the secrets that are told by their form.
Does not cover: markup (Rich's Text and the page's escaping do), secrets of no known form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "[masked]"
_SHORTEST = 8  # shorter values of the environment would mask ordinary words

# Reorder, hide or join what is seen: bidi controls, zero width, line separators, tags, fillers.
_HIDDEN = frozenset(
    [
        *(0x00AD, 0x034F, 0x061C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180E, 0x3164, 0xFEFF, 0xFFA0),
        *range(0x200B, 0x2010),
        *range(0x2028, 0x202F),
        *range(0x2060, 0x2070),
        *range(0xFFF0, 0xFFFC),
        *range(0xE0000, 0xE0080),
    ]
)

# Names of things that are secret; a bare "key" is not (sort --key=…, key=lambda …).
_NAME = (
    r"(?:[\w.\-]*(?:passw(?:or)?d|secret|credentials?)"
    r"|(?:[\w.\-]*[_.\-])?(?:token|pwd|auth|apikey)"
    r"|[\w.\-]*(?:api|access|secret|private|ssh|signing|encryption|master)[_.\-]?key"
    r"|(?-i:[A-Z0-9_]*_KEY))"
)
_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.S),
        MASK,
    ),
    (re.compile(r"(?i)\b((?:proxy-)?authorization\s*[:=]\s*)[^\r\n\"']+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b((?:set-)?cookie\s*:\s*)[^\r\n\"']+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=\-]{8,}"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.\-]{1,20}://)[^\s/@\"']*:[^\s/@\"']*@"), rf"\1{MASK}@"),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.\-]{1,20}://)[A-Za-z0-9_\-]{16,}@"), rf"\1{MASK}@"),
    (
        re.compile(
            r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_\-]{12,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
            r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[\w\-]{16,}"
            r"|\bhf_[A-Za-z0-9]{20,}|\bxox[abeoprs]-[A-Za-z0-9\-]{10,}|\bAIza[\w\-]{30,}"
            r"|\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w\-]{30,}"
            r"|\beyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]*"
        ),
        MASK,
    ),
    (
        re.compile(rf"(?i)(?<![A-Za-z0-9_.\-])({_NAME}[\"']?\s*[=:]\s*)([\"'])(?:(?!\2).){{4,}}\2"),
        rf"\1\2{MASK}\2",
    ),
    (
        re.compile(
            rf"(?i)(?<![A-Za-z0-9_.\-])({_NAME}[\"']?\s*[=:]\s*)(?!\[masked\]|\d+\b)[^\s\"'&;|]{{6,}}"
        ),
        rf"\1{MASK}",
    ),
)
_SECRET_NAME = re.compile(rf"(?i)^{_NAME}s?$")


def printable(text: str) -> str:
    """`text` with every control or hidden character but newline and tab shown as an escape."""
    return "".join(c if _visible(c) else _escape(ord(c)) for c in text)


def masked(text: str, values: Iterable[str] = ()) -> str:
    """`text` without secrets: those of a known form, and the given values wherever they stand."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, MASK)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def clean(text: str, values: Iterable[str] = (), *, longest: int = 0) -> str:
    """`masked`, then `printable`; at most `longest` characters (0: all), an ellipsis says so."""
    if longest and len(text) > 4 * longest + 4096:  # bounds the work on huge texts
        text = text[: 4 * longest + 4096]
    shown = printable(masked(text, values))
    return shown if not longest or len(shown) <= longest else shown[: longest - 1] + "…"


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values of the variables whose names say that they are secret."""
    return tuple(
        value
        for name, value in environ.items()
        if _SECRET_NAME.match(name) and len(value) >= _SHORTEST
    )


def _visible(char: str) -> bool:
    code = ord(char)
    if code < 127:
        return code >= 32 or char in "\n\t"
    return code >= 160 and code not in _HIDDEN and not 0xD800 <= code < 0xE000


def _escape(code: int) -> str:
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
