#!/usr/bin/bash
echo {{pair.1}} > {{pair.0}}.txt
