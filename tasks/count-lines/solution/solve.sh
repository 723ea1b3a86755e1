#!/usr/bin/bash
wc -l < {{pair.0}}.txt > {{pair.1}}.txt
