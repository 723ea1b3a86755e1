#!/usr/bin/bash
reward=0
[ -d done ] && [ ! -L done ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
