#!/usr/bin/bash
# 1 when hello.txt holds the one word hello.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain hello.txt && [ "$(/usr/bin/head -c 64 hello.txt | /usr/bin/tr -d '[:space:]')" = hello ]; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
