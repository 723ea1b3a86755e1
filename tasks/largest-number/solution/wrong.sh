#!/usr/bin/bash
sort {{file}}.txt | tail -n 1 > max.txt
