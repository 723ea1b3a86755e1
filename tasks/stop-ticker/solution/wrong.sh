#!/usr/bin/bash
bash ticker.sh > {{file}}.txt
head -n {{n}} {{file}}.txt > short.txt
mv short.txt {{file}}.txt
