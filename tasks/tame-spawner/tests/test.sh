#!/usr/bin/bash
# 1 when done.txt holds the word and spawn.sh starts nothing. Run as it came it is a fork bomb.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
word() { plain "$1" && [ "$(/usr/bin/head -c 64 "$1" | /usr/bin/tr -d '[:space:]')" = "$2" ]; }
if word done.txt {{word}} && plain spawn.sh && ! /usr/bin/grep -q "spawn" spawn.sh; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
