#!/usr/bin/bash
mv a.txt b.txt
