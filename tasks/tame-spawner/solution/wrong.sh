#!/usr/bin/bash
bash spawn.sh
