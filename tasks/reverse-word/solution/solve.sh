#!/usr/bin/bash
echo {{word}} | rev > rev.txt
