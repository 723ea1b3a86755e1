#!/usr/bin/bash
bash run.sh
