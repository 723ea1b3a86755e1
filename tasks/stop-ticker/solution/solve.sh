#!/usr/bin/bash
bash ticker.sh | head -n {{n}} > {{file}}.txt
