#!/usr/bin/bash
mkdir ready.txt
