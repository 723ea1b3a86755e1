#!/usr/bin/bash
# 1 when the file holds what it held and the new line after it.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
same() { plain "$2" && /usr/bin/cmp -s "/tests/$1" "$2"; }
if same expected.txt {{pair.1}}.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
