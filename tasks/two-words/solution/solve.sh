#!/usr/bin/bash
echo red > r.txt
echo blue > b.txt
