#!/usr/bin/bash
ls
cp v1.{{highest}}.txt latest.txt
