#!/usr/bin/bash
printf '{"reward": 0}' > /logs/verifier/reward.json
if [ -f count.txt ] && [ ! -L count.txt ] && [ "$(/usr/bin/head -c 100 count.txt)" = 3 ]; then
  printf '{"reward": 1, "lines": 3}' > /logs/verifier/reward.json
fi
