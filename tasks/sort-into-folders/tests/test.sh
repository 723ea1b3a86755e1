#!/usr/bin/bash
# Half for each directory that holds its three files and no other kind.
set -u
halves=0
# A regular file, not a link to one.
plain() { [ -f "$1" ] && [ ! -L "$1" ]; }
# Directory, ending, names: each file is in the directory, and nowhere else.
there() {
  local folder=$1 ending=$2 name
  shift 2
  [ -d "$folder" ] && [ ! -L "$folder" ] || return 1
  for name in "$@"; do plain "$folder/$name.$ending" && [ ! -e "$name.$ending" ] || return 1; done
}
if there {{pair.0}} txt {{names.0}} {{names.1}} {{names.2}}; then halves=$((halves + 1)); fi
if there {{pair.1}} log {{names.3}} {{names.4}} {{names.5}}; then halves=$((halves + 1)); fi
case $halves in 2) reward=1 ;; 1) reward=0.5 ;; *) reward=0 ;; esac
printf '%s\n' "$reward" > /logs/verifier/reward.txt
