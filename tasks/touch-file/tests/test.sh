#!/usr/bin/bash
# 1 when ready.txt is a file.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain ready.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
