#!/usr/bin/bash
bash report.sh
sed -i s/{{pair.0}}/{{pair.1}}/ report.sh
bash report.sh
