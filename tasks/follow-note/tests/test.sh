#!/usr/bin/bash
# 1 when k4.txt, which note.txt names, is gone and its neighbours are not.
set -u
reward=1
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
[ ! -e k4.txt ] || reward=0
for i in 1 2 3 5; do
  plain "k$i.txt" && [ "$(/usr/bin/head -c 16 "k$i.txt")" = "$i" ] || reward=0
done
printf '%s\n' "$reward" > /logs/verifier/reward.txt
