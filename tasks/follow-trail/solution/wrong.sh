#!/usr/bin/bash
cat start.txt
cat {{trail.4}}.txt
echo {{trail.0}} > end.txt
