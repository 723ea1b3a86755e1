#!/usr/bin/bash
cp a.txt c.txt
