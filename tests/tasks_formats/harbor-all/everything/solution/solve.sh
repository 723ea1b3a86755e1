#!/usr/bin/bash
echo "$GREETING, $ENDING" > greeting.txt
