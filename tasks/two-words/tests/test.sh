#!/usr/bin/bash
# Half for each file that holds its word.
set -u
halves=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
word() { /usr/bin/head -c 64 "$1" | /usr/bin/tr -d '[:space:]'; }
if plain r.txt && [ "$(word r.txt)" = red ]; then halves=$((halves + 1)); fi
if plain b.txt && [ "$(word b.txt)" = blue ]; then halves=$((halves + 1)); fi
case $halves in 2) reward=1 ;; 1) reward=0.5 ;; *) reward=0 ;; esac
printf '%s\n' "$reward" > /logs/verifier/reward.txt
