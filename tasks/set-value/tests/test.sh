#!/usr/bin/bash
# 1 when port, and port alone, has the new value.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
same() { plain "$2" && /usr/bin/cmp -s "/tests/$1" "$2"; }
if same expected.txt app.conf; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
