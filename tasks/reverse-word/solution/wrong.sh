#!/usr/bin/bash
echo {{word}} > rev.txt
