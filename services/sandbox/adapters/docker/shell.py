"""What runs in a container for one step, and how what it tells is read. Pure.

Owns: three bash scripts and the framing of their output. The shell of a step gets its output
through a pipe of its own; the script around it ends that output with a token when the shell has
ended, whoever else still holds the pipe, and tells exit code and session on the other channel.
Promise: nothing read here is trusted: it comes from the agent's own container and decides nothing
but what that agent's own next step starts with. What an agent forges here it does to itself: a
limit that struck, and who survived, is asked elsewhere (counters.py, the engine).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from muster.types import Value
from services.sandbox.adapters import shell_state

BASH = "/bin/bash"
STATE_FOLDER = shell_state.FOLDER
_CONTROL_MAX = 1 << 20  # of the control channel; the rest is dropped

OWN = 2  # processes of a box in which nothing of the agent's lives: PID 1 and its sleep
DONE = b"done"
# PID 1. While it waits for a child, bash reaps what is orphaned too (it does not while it reads);
# as PID 1 of its namespace it takes no signal from within, and a sleep that is killed begins anew.
_INIT = "trap '' TERM INT HUP QUIT; while [ $SECONDS -lt {life} ]; do sleep {life} & wait; done"

# Processes as `pid:start`, so that a number used again is not taken for its former owner.
_LIST = """
started() {
  local stat at pid words line
  for stat in /proc/[0-9]*/stat; do
    line=; IFS= read -rd '' line <"$stat"
    pid=${stat#/proc/} pid=${pid%/stat} words=(${line##*) })
    [ -z "$line" ] || [ "${words[0]}" = Z ] || [ "$pid" = $$ ] || all+=("$pid:${words[19]}")
  done 2>/dev/null
}
"""
# $1 token, $2 folder, then NAME=VALUE and what to run, as env takes them.
_AROUND = (
    _LIST
    + """
exec 4>&2 2>/dev/null; token=$1 folder=$2 state=STATE; shift 2
all=(); started; printf 'known %s\\n' "${all[*]}" >&4
if [ -e $state ] || [ -L $state ]; then rm -rf $state; fi
cd -- "$folder" || cd /
exec 3> >(exec 4>&-; cat; exec cat >/dev/null)
env -i -- "$@" </dev/null >&3 2>&1 3>&- 4>&-
code=$? saved=0
[ -f $state ] && [ ! -L $state ] && saved=1
{
  printf 'exit %d %d\\n' $code $saved
  if [ $saved = 1 ]; then
    while IFS= read -rd '' each; do printf '%s\\0' "$each"; done <$state
  fi
  printf '\\n%s\\n' "$token"
} >&4
printf '%s' "$token" >&3
""".replace("STATE", f"{STATE_FOLDER}/state")
)
# The arguments are the processes to spare. With none of the agent's, one call of the kernel ends
# all. It says when it is done: its own end may be told seconds later.
_KILL = (
    _LIST
    + """
declare -A spared; for each in "$@"; do spared[$each]=1; done
others() {
  all=(); started; found=()
  for each in "${all[@]}"; do [ -n "${spared[$each]}" ] || found+=("${each%%:*}"); done
}
if [ $# -le 2 ]; then
  kill -KILL -1
else
  for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    others; [ ${#found[@]} -gt 0 ] || break
    kill -STOP "${found[@]}"; kill -KILL "${found[@]}"
  done 2>/dev/null
  [ ${#found[@]} -eq 0 ] || kill -KILL -1
fi
printf done
"""
)
_ALL = "kill -KILL -1; printf done"


class Session(Value, frozen=True):
    """What one step leaves to the next."""

    cwd: str = "/"
    env: dict[str, str] = {}


def init(life_s: int) -> list[str]:
    """PID 1 of a container, which ends by itself after `life_s` seconds."""
    return [BASH, "--noprofile", "--norc", "-c", _INIT.format(life=life_s)]


def step(command: str, token: str, session: Session) -> list[str]:
    """The call of one step."""
    return _around(token, session, ["-c", shell_state.WRAPPER, "bash", command])


def script(path: str, token: str, session: Session) -> list[str]:
    """The call of a script that is a file."""
    return _around(token, session, [path])


def _around(token: str, session: Session, last: list[str]) -> list[str]:
    pairs = [f"{name}={value}" for name, value in session.env.items()]
    what = [BASH, "--noprofile", "--norc", *last]
    return [BASH, "--noprofile", "--norc", "-c", _AROUND, "step", token, session.cwd, *pairs, *what]


def kill(spared: list[str]) -> list[str]:
    """The call that ends all processes but these, PID 1 and itself."""
    return [BASH, "--noprofile", "--norc", "-c", _KILL, "kill", *spared]


def kill_all() -> list[str]:
    """The call that ends all processes but PID 1 and itself."""
    return [BASH, "--noprofile", "--norc", "-c", _ALL]


class Until:
    """Passes an output on up to a token, which may come in pieces. O(its length) memory."""

    def __init__(self, token: bytes):
        self._token, self._held = token, b""
        self.found = False

    def add(self, data: bytes) -> bytes:
        """What of `data`, and of what was held back, lies before the token for sure."""
        if self.found:
            return b""
        data = self._held + data
        before, token, _ = data.partition(self._token)
        if token:
            self.found, self._held = True, b""
            return before
        keep = len(self._token) - 1
        cut = max(0, len(data) - keep)
        self._held = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """What was held back, when the output has ended without the token."""
        held, self._held = self._held, b""
        return held


@dataclass
class Control:
    """The control channel of one step: which processes there were, then how its shell ended."""

    token: bytes
    _data: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self._data += data[: _CONTROL_MAX - len(self._data)]

    @property
    def ended(self) -> bool:
        """Whether the shell has ended."""
        return self._data.endswith(b"\n" + self.token + b"\n")

    @property
    def begun(self) -> bool:
        """Whether the script around the shell was started."""
        return bool(self._data)

    @property
    def known(self) -> list[str]:
        """Processes, as `pid:start`, that were there before the step."""
        line = bytes(self._data).partition(b"\n")[0].decode("ascii", "replace").split()
        words = line[1:] if line[:1] == ["known"] else []
        return [word for word in words if word.replace(":", "").isdecimal()][:4096]

    def exit(self) -> tuple[int, bool] | None:
        """Exit code, and whether the shell came to its end by itself; None when not told."""
        if not self.ended:
            return None
        words = bytes(self._data).split(b"\n", 2)[1].split()
        if len(words) != 3 or words[0] != b"exit" or not words[1].isdigit():
            return None
        return min(int(words[1]), 255), words[2] == b"1" and self.session(Session()) is not None

    def session(self, before: Session) -> Session | None:
        """Folder and environment that the shell left; None when it left none that can be used."""
        if not self.ended:
            return None
        data = bytes(self._data).split(b"\n", 2)[2][: -len(self.token) - 2]
        if len(data) > shell_state.STATE_MAX or not data.endswith(b"\0"):
            return None
        # The engine takes text only: bytes that are none do not come back as they were.
        cwd, *pairs = data[:-1].decode("utf-8", "replace").split("\0")
        env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        carried = {k: v for k, v in env.items() if k and k not in shell_state.NOT_CARRIED}
        # No variable at all: `env` itself did not start, for one that is over 128 KiB.
        folder = cwd if cwd.startswith("/") else before.cwd
        return Session(folder, carried or before.env)
