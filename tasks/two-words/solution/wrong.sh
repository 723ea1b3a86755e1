#!/usr/bin/bash
echo blue > r.txt
echo red > b.txt
