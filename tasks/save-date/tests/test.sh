#!/usr/bin/bash
# 1 when now.txt holds today's year and day of the month, in whatever form. A minute ago counts
# too, for an episode that meets midnight.
set -u
reward=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
shows() {
  local year day text
  year=$(/usr/bin/date -d "$1" +%Y)
  day=$(/usr/bin/date -d "$1" +%-d)
  text=$(/usr/bin/head -c 256 now.txt | /usr/bin/tr -d '\000')
  [[ $text =~ (^|[^0-9])$year([^0-9]|$) && $text =~ (^|[^0-9])0?$day([^0-9]|$) ]]
}
if plain now.txt && { shows now || shows '1 minute ago'; }; then
  reward=1
fi
printf '%s\n' "$reward" > /logs/verifier/reward.txt
