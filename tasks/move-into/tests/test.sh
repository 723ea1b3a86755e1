#!/usr/bin/bash
# 1 when the file lies in the directory, and nowhere else.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
same() { plain "$2" && /usr/bin/cmp -s "/tests/$1" "$2"; }
if [ ! -e {{pair.0}}.txt ] && [ ! -L {{pair.1}} ] && same expected.txt {{pair.1}}/{{pair.0}}.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
