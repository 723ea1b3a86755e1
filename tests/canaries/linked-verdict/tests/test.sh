#!/usr/bin/bash
# The score is a file that the agent's own program wrote.
cp -P /app/answer.txt /logs/verifier/reward.txt
