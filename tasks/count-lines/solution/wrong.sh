#!/usr/bin/bash
wc -c < {{pair.0}}.txt > {{pair.1}}.txt
