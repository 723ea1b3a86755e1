"""How the shell of a step leaves its session to the next, the same in every backend. Pure.

Promise: the state is written by name when the shell ends, so that no child inherits a descriptor
for it; a trap covers `exit` inside the command; one line, so that the shell counts the lines of the
command from 1. Standard library only: native boxes have it in PID 1. Does not cover: reading what
an agent may have written there.
"""

from __future__ import annotations

FOLDER = "/run/muster"
# Variables that would act on the shell itself at its next start, and the shell's own.
NOT_CARRIED = frozenset({"BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "PS4", "SHLVL", "_", "OLDPWD"})
_SAVE = f"{{ builtin printf '%s\\0' \"$PWD\"; /usr/bin/env -0; }} >{FOLDER}/state"
# $1 is the command.
WRAPPER = f'__save() {{ {{ {_SAVE}; }} 2>/dev/null; }}; trap __save EXIT; builtin eval -- "$1"'
STATE_MAX = 256 << 10  # bytes
