#!/usr/bin/bash
echo date > now.txt
