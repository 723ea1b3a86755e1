#!/usr/bin/bash
mv a.txt c.txt
