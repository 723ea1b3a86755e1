#!/usr/bin/bash
echo 0 > /logs/verifier/reward.txt
cmp -s /app/answer.txt /tests/answer.txt && echo 1 > /logs/verifier/reward.txt
exit 0
