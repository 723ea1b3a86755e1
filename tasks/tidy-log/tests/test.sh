#!/usr/bin/bash
# Half when logs is a directory, the other half when debug.log is in it and nowhere else.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if [ -d logs ] && [ ! -L logs ]; then
  reward=0.5
  if plain logs/debug.log && [ ! -e debug.log ]; then reward=1; fi
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
