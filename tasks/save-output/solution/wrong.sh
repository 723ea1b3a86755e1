#!/usr/bin/bash
echo {{command}} > {{file}}.txt
