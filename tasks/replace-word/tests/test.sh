#!/usr/bin/bash
# 1 when each of the three is replaced and the rest is as it was.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
same() { plain "$2" && /usr/bin/cmp -s "/tests/$1" "$2"; }
if same expected.txt text.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
