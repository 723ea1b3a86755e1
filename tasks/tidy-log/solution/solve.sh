#!/usr/bin/bash
mkdir logs
mv debug.log logs/
