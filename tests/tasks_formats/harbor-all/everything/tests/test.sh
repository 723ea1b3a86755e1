#!/usr/bin/bash
echo 0 > /logs/verifier/reward.txt
if [ "$PWD" = /app/out ] && [ -f greeting.txt ] && [ ! -L greeting.txt ]; then
  [ "$(/usr/bin/head -c 100 greeting.txt)" = "$EXPECTED" ] && echo 1 > /logs/verifier/reward.txt
fi
