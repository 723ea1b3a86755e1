#!/usr/bin/bash
head -c $(({{n}} * 1024)) /dev/zero > {{file}}.bin
