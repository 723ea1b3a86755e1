#!/usr/bin/bash
reward=0
[ "$(cat /app/answer.txt 2>/dev/null)" = 42 ] && reward=1
printf '{"reward": %s, "name": "%s"}\n' "$reward" "$(cat /app/name.txt)" > /logs/verifier/reward.json
