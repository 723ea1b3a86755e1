#!/usr/bin/bash
# Half for each of the two things that check.sh asks for.
set -u
halves=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
if plain ready.txt; then halves=$((halves + 1)); fi
if [ -d out ] && [ ! -L out ]; then halves=$((halves + 1)); fi
case $halves in 2) reward=1 ;; 1) reward=0.5 ;; *) reward=0 ;; esac
printf '%s\n' "$reward" > /logs/verifier/reward.txt
