#!/usr/bin/bash
# 1 when joined.txt has the two names that both tables know, in order, fields one space apart.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain joined.txt && /usr/bin/sort /tests/rows.txt | /usr/bin/cmp -s - joined.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
