#!/usr/bin/bash
sed -i 's/{{old}}/{{new}}/' app.conf
