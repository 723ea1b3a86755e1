#!/usr/bin/bash
sort -n {{file}}.txt | tail -n 1 > max.txt
