#!/usr/bin/bash
sed -i s/{{pair.0}}/{{pair.1}}/ text.txt
