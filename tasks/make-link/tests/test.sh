#!/usr/bin/bash
# 1 when the link exists and leads to the file.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if [ -L {{pair.1}} ] && plain {{pair.0}}.txt && [ {{pair.1}} -ef {{pair.0}}.txt ]; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
