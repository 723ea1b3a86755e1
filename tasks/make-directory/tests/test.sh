#!/usr/bin/bash
# 1 when logs/today is a directory.
set -u
reward=0
if [ -d logs/today ] && [ ! -L logs ] && [ ! -L logs/today ]; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
