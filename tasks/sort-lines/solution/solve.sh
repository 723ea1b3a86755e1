#!/usr/bin/bash
sort {{pair.0}}.txt > {{pair.1}}.txt
