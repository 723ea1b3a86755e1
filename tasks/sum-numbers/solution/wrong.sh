#!/usr/bin/bash
awk '{ s += $1 } END { print s - {{last}} }' {{file}}.txt > sum.txt
