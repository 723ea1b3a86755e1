#!/usr/bin/bash
# 1 when latest.txt is the file with the highest version, which is still there.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain latest.txt && plain v1.{{highest}}.txt && /usr/bin/cmp -s latest.txt v1.{{highest}}.txt; then
  [ "$(/usr/bin/head -c 64 latest.txt | /usr/bin/cut -d ' ' -f 1)" = "1.{{highest}}" ] && reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
