#!/usr/bin/bash
awk '{ s += $1 } END { print s }' {{file}}.txt > sum.txt
