#!/usr/bin/bash
join <(sort ages.txt) <(sort towns.txt) > joined.txt
