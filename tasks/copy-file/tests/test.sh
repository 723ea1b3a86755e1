#!/usr/bin/bash
# 1 when b.txt holds what a.txt held, and a.txt still does.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
holds() { plain "$1" && printf 'alpha\nbeta\n' | /usr/bin/cmp -s - "$1"; }
if holds a.txt && holds b.txt; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
