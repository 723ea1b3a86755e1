#!/usr/bin/bash
mkdir logs/today
