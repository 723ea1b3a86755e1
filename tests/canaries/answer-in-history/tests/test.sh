#!/usr/bin/bash
echo 0 > /logs/verifier/reward.txt
grep -qx SECRET-4711 /app/answer.txt && echo 1 > /logs/verifier/reward.txt
exit 0
