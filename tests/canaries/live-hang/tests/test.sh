#!/usr/bin/bash
echo 0 > /logs/verifier/reward.txt
exec 3<>/dev/tcp/127.0.0.1/8000 || exit 0
read -r said <&3
[ "$said" = 42 ] && echo 1 > /logs/verifier/reward.txt
exit 0
