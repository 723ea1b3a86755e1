#!/usr/bin/bash
sed -i 's/^port = .*/port = {{new}}/' app.conf
