#!/usr/bin/bash
# 1 when old is gone and a.txt is not.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if [ ! -e old ] && plain a.txt && printf 'alpha\nbeta\n' | /usr/bin/cmp -s - a.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
