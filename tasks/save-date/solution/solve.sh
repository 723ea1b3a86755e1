#!/usr/bin/bash
date > now.txt
