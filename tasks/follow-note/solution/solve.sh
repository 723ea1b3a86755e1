#!/usr/bin/bash
cat note.txt
rm k4.txt
