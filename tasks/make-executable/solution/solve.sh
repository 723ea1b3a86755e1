#!/usr/bin/bash
chmod +x run.sh
