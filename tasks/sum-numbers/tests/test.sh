#!/usr/bin/bash
# 1 when sum.txt holds the sum.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
word() { plain "$1" && [ "$(/usr/bin/head -c 64 "$1" | /usr/bin/tr -d '[:space:]')" = "$2" ]; }
if word sum.txt {{answer}}; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
