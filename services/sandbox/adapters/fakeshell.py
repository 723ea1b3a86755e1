"""A toy shell over a dict of files: just enough of bash for tests. Pure.

Knows: `;`, newlines, `&&`, `$NAME`, quotes, `> file`, `>> file`, comments, and the commands
echo, printf, cat, cd, pwd, export, test -f / -e / a = b, exit, exec /bin/sh -c, true, false, sleep,
kill-box.
`sleep N` takes N seconds of the step's limit but no real time. Unknown commands end with 127.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

_NAME = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class ToyBroken(Exception):
    """The command broke the box."""


class _Exit(Exception):
    def __init__(self, code: int):
        self.code = code


class _TimeUp(Exception):
    pass


@dataclass(frozen=True)
class Result:
    """What a command line gave; times in seconds of the toy's own clock."""

    code: int
    output: bytes
    timed_out: bool
    took_s: float


class Shell:
    """One session: files, working directory, exported environment."""

    def __init__(self, files: dict[str, bytes]):
        self.files = files
        self.cwd = "/"
        self.env: dict[str, str] = {}
        self._out = bytearray()
        self._took = 0.0
        self._limit = 0.0

    def run(self, text: str, limit_s: float) -> Result:
        """Run a command line or script; stops at `limit_s` of slept time."""
        self._out, self._took, self._limit = bytearray(), 0.0, limit_s
        code, late = 0, False
        try:
            for line in text.splitlines():
                for chain in _split(line.strip(), ";"):
                    code = self._chain(chain, code)
        except _Exit as left:
            code = left.code
        except _TimeUp:
            late = True
        return Result(code, bytes(self._out), late, min(self._took, limit_s))

    def _chain(self, text: str, code: int) -> int:
        for part in _split(text, "&&"):
            words = shlex.split(part, comments=True)
            if not words:
                return code
            code = self._simple(words)
            if code:
                return code
        return code

    def _simple(self, words: list[str]) -> int:
        words = [_NAME.sub(lambda m: self.env.get(m[1] or m[2], ""), word) for word in words]
        target, append = "", False
        for sign in (">>", ">"):
            if sign in words:
                at = words.index(sign)
                target, append = self._path(words[at + 1]), sign == ">>"
                words = words[:at] + words[at + 2 :]
                break
        command = _COMMANDS.get(words[0])
        if command is None:
            self._out += f"bash: line 1: {words[0]}: command not found\n".encode()
            return 127
        code, text = command(self, words[1:])
        if target:
            kept = self.files.get(target, b"") if append else b""
            self.files[target] = kept + text
        else:
            self._out += text
        return code

    def _path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.cwd, name))

    def _echo(self, words: list[str]) -> tuple[int, bytes]:
        return 0, " ".join(words).encode() + b"\n"

    def _printf(self, words: list[str]) -> tuple[int, bytes]:
        return 0, words[0].replace("\\n", "\n").encode()

    def _cat(self, words: list[str]) -> tuple[int, bytes]:
        parts: list[bytes] = []
        for word in words:
            if self._path(word) not in self.files:
                self._out += f"cat: {word}: No such file or directory\n".encode()
                return 1, b"".join(parts)
            parts.append(self.files[self._path(word)])
        return 0, b"".join(parts)

    def _cd(self, words: list[str]) -> tuple[int, bytes]:
        self.cwd = self._path(words[0] if words else "/root")
        return 0, b""

    def _pwd(self, words: list[str]) -> tuple[int, bytes]:
        return 0, self.cwd.encode() + b"\n"

    def _export(self, words: list[str]) -> tuple[int, bytes]:
        for word in words:
            name, _, value = word.partition("=")
            self.env[name] = value
        return 0, b""

    def _test(self, words: list[str]) -> tuple[int, bytes]:
        if len(words) == 3:
            return int(words[0] != words[2]), b""
        return int(self._path(words[1]) not in self.files), b""

    def _exit(self, words: list[str]) -> tuple[int, bytes]:
        raise _Exit(int(words[0]) if words else 0)

    def _sleep(self, words: list[str]) -> tuple[int, bytes]:
        self._took += float(words[0])
        if self._took > self._limit:
            raise _TimeUp
        return 0, b""

    def _kill_box(self, words: list[str]) -> tuple[int, bytes]:
        raise ToyBroken("the box was broken by its own command")

    def _exec(self, words: list[str]) -> tuple[int, bytes]:
        """Only `exec /bin/sh -c TEXT`: a shell of its own over the same files."""
        if words[:2] != ["/bin/sh", "-c"] or len(words) != 3:
            raise _Exit(127)
        inner = Shell(self.files)
        inner.cwd, inner.env = self.cwd, dict(self.env)
        result = inner.run(words[2], self._limit - self._took)
        self._took += result.took_s
        self._out += result.output
        if result.timed_out:
            raise _TimeUp
        raise _Exit(result.code)

    def _true(self, words: list[str]) -> tuple[int, bytes]:
        return 0, b""

    def _false(self, words: list[str]) -> tuple[int, bytes]:
        return 1, b""


def _split(text: str, mark: str) -> list[str]:
    """Split at `mark` outside of quotes."""
    parts, quote, start, at = [], "", 0, 0
    while at < len(text):
        if quote:
            quote = "" if text[at] == quote else quote
        elif text[at] in "'\"":
            quote = text[at]
        elif text.startswith(mark, at):
            parts.append(text[start:at])
            at += len(mark)
            start = at
            continue
        at += 1
    return [*parts, text[start:]]


_COMMANDS: dict[str, Callable[[Shell, list[str]], tuple[int, bytes]]] = {
    "echo": Shell._echo,
    "printf": Shell._printf,
    "cat": Shell._cat,
    "cd": Shell._cd,
    "pwd": Shell._pwd,
    "export": Shell._export,
    "test": Shell._test,
    "exit": Shell._exit,
    "exec": Shell._exec,
    "sleep": Shell._sleep,
    "kill-box": Shell._kill_box,
    "true": Shell._true,
    ":": Shell._true,
    "false": Shell._false,
}
