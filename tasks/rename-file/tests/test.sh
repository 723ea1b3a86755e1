#!/usr/bin/bash
# 1 when c.txt holds what a.txt held, and a.txt is gone.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if [ ! -e a.txt ] && plain c.txt && printf 'alpha\nbeta\n' | /usr/bin/cmp -s - c.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
