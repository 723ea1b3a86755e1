#!/usr/bin/bash
cat /dev/zero > {{file}}.bin
