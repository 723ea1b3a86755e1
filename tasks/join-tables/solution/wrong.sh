#!/usr/bin/bash
paste -d " " ages.txt towns.txt > joined.txt
