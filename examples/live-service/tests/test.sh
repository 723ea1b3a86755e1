#!/usr/bin/bash
echo 0 > /logs/verifier/reward.txt
got="$(/usr/bin/timeout 5 /usr/bin/python3 -I -c '
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:8080/page.txt", timeout=4).read(100).decode())
' 2> /dev/null)"
[ "$got" = "served by you" ] && echo 1 > /logs/verifier/reward.txt
