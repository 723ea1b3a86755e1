#!/usr/bin/bash
rm -f ./*.txt
