#!/usr/bin/bash
head -n {{n}} {{pair.0}}.txt > {{pair.1}}.txt
