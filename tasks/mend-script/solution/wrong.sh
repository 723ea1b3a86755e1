#!/usr/bin/bash
bash report.sh
mv {{pair.1}}.txt {{pair.0}}.txt
bash report.sh
