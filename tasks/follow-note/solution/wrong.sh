#!/usr/bin/bash
cat note.txt
rm k*.txt
