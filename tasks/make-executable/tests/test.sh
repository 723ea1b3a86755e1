#!/usr/bin/bash
# 1 when run.sh is executable and says what it said.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain run.sh && [ -x run.sh ] && printf 'echo hi\n' | /usr/bin/cmp -s - run.sh; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
