#!/usr/bin/bash
ls
cp "$(ls v*.txt | sort | tail -n 1)" latest.txt
