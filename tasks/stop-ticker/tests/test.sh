#!/usr/bin/bash
# 1 when the file holds the first lines and no more. Waiting for the end of ticker.sh hangs.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain {{file}}.txt && /usr/bin/seq -f "tick %g" {{n}} | /usr/bin/cmp -s - {{file}}.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
