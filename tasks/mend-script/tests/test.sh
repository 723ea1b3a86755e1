#!/usr/bin/bash
# 1 when report.sh counts the lines of {{pair.1}}.txt: of another one than the agent saw, and run
# as nobody, who may not write the verdict.
set -u
reward=0
echo 0 > /logs/verifier/reward.txt
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
folder=$(/usr/bin/mktemp -d)
/usr/bin/seq {{more}} > "$folder/{{pair.1}}.txt"
/usr/bin/chmod -R a+rX "$folder"
if plain report.sh; then
  /usr/bin/head -c 65536 report.sh > "$folder/report.sh"
  /usr/bin/chmod a+r "$folder/report.sh"
  cd "$folder" || exit
  aside="/usr/bin/setpriv --reuid=nobody --regid=nogroup --clear-groups --inh-caps=-all --"
  got=$(/usr/bin/timeout 5 $aside /usr/bin/bash report.sh 2> /dev/null | /usr/bin/head -c 256)
  [ "$got" = "{{label}}: {{more}}" ] && reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
