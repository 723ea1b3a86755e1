#!/usr/bin/bash
echo {{pair.0}} > {{pair.1}}.txt
