#!/usr/bin/bash
# 1 when the file holds what the command prints in this very folder.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain {{file}}.txt && {{command}} | /usr/bin/cmp -s - {{file}}.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
