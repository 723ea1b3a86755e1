#!/usr/bin/bash
echo 0 > /logs/verifier/reward.txt
/bin/sh -c 'grep -qx 42 /app/answer.txt' && echo 1 > /logs/verifier/reward.txt
exit 0
