#!/usr/bin/bash
echo "echo {{word}} > done.txt" > spawn.sh
bash spawn.sh
