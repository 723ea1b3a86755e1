#!/usr/bin/bash
tail -n {{n}} {{pair.0}}.txt > {{pair.1}}.txt
