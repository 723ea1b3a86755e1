#!/usr/bin/bash
# 1 when the first number in the answer is the count of lines.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
# The first number in a file.
number() { plain "$1" && [[ $(/usr/bin/head -c 64 "$1" | /usr/bin/tr -d '\000') =~ ^[^0-9]*([0-9]+) ]] && [ "${BASH_REMATCH[1]}" = "$2" ]; }
if number {{pair.1}}.txt {{answer}}; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
