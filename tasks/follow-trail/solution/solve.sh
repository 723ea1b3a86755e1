#!/usr/bin/bash
cat start.txt
cat {{trail.0}}.txt
cat {{trail.1}}.txt
cat {{trail.2}}.txt
echo {{trail.3}} > end.txt
