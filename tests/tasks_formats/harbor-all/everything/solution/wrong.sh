#!/usr/bin/bash
echo '$GREETING, world' > greeting.txt
