#!/usr/bin/bash
# 1 when the file has its size and holds zeros. A copy without a count fills the disk.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain {{file}}.bin && /usr/bin/head -c $(({{n}} * 1024)) /dev/zero | /usr/bin/cmp -s - {{file}}.bin; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
