#!/bin/sh
# The two images that Muster's are made of, from Debian's packages, for machines that reach a
# package mirror but no image registry: muster-local/python:3.11-bookworm, muster-local/redis:7.
#
#   deploy/local-images.sh            needs root, debootstrap and a running Docker Engine
#   export BASE_IMAGE=muster-local/python:3.11-bookworm REDIS_IMAGE=muster-local/redis:7
#
# DEBIAN_MIRROR names another mirror. Images that are there are kept.
set -eu
python=muster-local/python:3.11-bookworm
redis=muster-local/redis:7
export DOCKER_BUILDKIT=0

if ! docker image inspect "$python" >/dev/null 2>&1; then
  command -v debootstrap >/dev/null || { echo "there is no debootstrap → apt-get install debootstrap" >&2; exit 2; }
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,procps \
    bookworm "$folder/root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} > "$folder/log" || { tail "$folder/log" >&2; exit 1; }
  # The engine puts its own of these two into containers; the rest is of no use there.
  rm -rf "$folder/root/etc/resolv.conf" "$folder/root/etc/hostname" \
    "$folder"/root/var/cache/apt/* "$folder"/root/var/lib/apt/lists/* \
    "$folder"/root/usr/share/doc/* "$folder"/root/usr/share/man/* "$folder"/root/usr/share/locale/*
  tar --numeric-owner -C "$folder/root" -c . | docker import -c 'CMD ["bash"]' - "$python" >/dev/null
fi

docker image inspect "$redis" >/dev/null 2>&1 || docker build -q -t "$redis" - >/dev/null <<EOF
FROM $python
RUN apt-get update -q && apt-get install -q -y --no-install-recommends redis-server \
 && rm -rf /var/lib/apt/lists/* && mkdir /data && chown redis:redis /data
WORKDIR /data
VOLUME /data
CMD ["redis-server"]
EOF
echo "export BASE_IMAGE=$python REDIS_IMAGE=$redis"
