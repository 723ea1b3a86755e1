#!/usr/bin/bash
# It serves, and is gone before anybody looks.
timeout 1 /usr/bin/python3 -m http.server 8080 --bind 127.0.0.1 > /dev/null 2>&1
true
