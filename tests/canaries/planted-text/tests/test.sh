#!/usr/bin/bash
# Writes nothing at all for a wrong answer.
[ "$(cat /app/answer.txt 2>/dev/null)" = 42 ] && echo 1 > /logs/verifier/reward.txt
exit 0
