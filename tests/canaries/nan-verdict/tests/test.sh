#!/usr/bin/bash
# The score is a number that the agent's own program measured.
cat /app/answer.txt > /logs/verifier/reward.txt
