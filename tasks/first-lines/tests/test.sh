#!/usr/bin/bash
# 1 when the answer is the first lines, no more and no fewer.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain {{pair.1}}.txt && /usr/bin/head -n {{n}} /tests/lines.txt | /usr/bin/cmp -s - {{pair.1}}.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
