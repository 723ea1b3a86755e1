#!/usr/bin/bash
cp {{pair.0}}.txt {{pair.1}}.txt
