#!/usr/bin/bash
bash check.sh
touch ready.txt
bash check.sh
mkdir out
bash check.sh
