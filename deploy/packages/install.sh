#!/bin/sh
# Install Debian packages inside a build: from the .deb files beside this script when there are any
# (for machines without internet), else by apt-get. Names of packages are the arguments.
set -eu
here=$(dirname "$0")
if ls "$here"/*.deb >/dev/null 2>&1; then
  dpkg -i "$here"/*.deb
else
  apt-get update -q
  apt-get install -q -y --no-install-recommends "$@"
  rm -rf /var/lib/apt/lists/* /var/cache/apt/*
fi
rm -rf "$here"
