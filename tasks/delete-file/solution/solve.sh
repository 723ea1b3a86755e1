#!/usr/bin/bash
rm {{pair.0}}.txt
