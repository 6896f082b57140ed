#!/bin/sh
# The steps of deploy/Dockerfile in a folder that debootstrap makes, for machines without Docker: as root,
#   sh scripts/release/image_trial.sh BUNDLE [FOLDER [ARCHITECTURE]]
# With arm64 and Debian's qemu-user-static, by emulation.
# RUN lines are taken from the Dockerfile. Prints after how many seconds the server was ready, and how long it took to stop.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
bundle=$(cd "$1" && pwd)
root=${2:-$here/build/image}
arch=${3:-$(dpkg --print-architecture)}

if [ ! -x "$root/usr/bin/python3" ]; then
    debootstrap --arch="$arch" --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$root" > /dev/null
fi
# What python:3.11-slim has and Debian's Python has not: `pip`, `python`, and no marker that refuses pip.
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
ln -sf python3 "$root/usr/bin/python"
for path in $(pip config list 2> /dev/null | grep -o "file://[^ ']*\|/[a-z][^ ']*" | sed 's,^file://,,' | sort -u); do
    [ -e "$path" ] && mkdir -p "$root$(dirname "$path")" && cp -rn "$path" "$root$(dirname "$path")/" # this machine's own package index
done
cp /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"

rm -rf "$root/source" "$root/bundle"
mkdir -p "$root/source" "$root/bundle"
git -C "$here" archive HEAD | tar -x -C "$root/source"
cp -r "$bundle/." "$root/bundle/"
# A RUN line and those that it goes on with, in the order of the Dockerfile.
awk '/^RUN /{on = 1; sub(/^RUN /, "")} on{print} !/\\$/{on = 0}' "$here/deploy/Dockerfile" > "$root/steps.sh"
chroot "$root" sh -c 'id specbuild > /dev/null 2>&1 && userdel -r specbuild 2> /dev/null; sh -eu /steps.sh' > /dev/null

port=8765
chroot --userspec=10001:10001 "$root" specbuild serve --host 0.0.0.0 --port $port /bundle 2> "$root/log.jsonl" &
server=$!
trap 'kill -9 $server 2> /dev/null || true' EXIT
began=$(date +%s.%N)
until curl -sf -o /dev/null "localhost:$port/health/ready"; do
    kill -0 $server
    sleep 0.05
done
ready=$(date +%s.%N)
curl -sf "localhost:$port/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "def main(", "max_tokens": 16, "temperature": 0}'
echo
kill -TERM $server
stopping=$(date +%s.%N)
wait $server && status=0 || status=$?
stopped=$(date +%s.%N)
python3 -c "print(f'ready after {$ready - $began:.1f} s, stopped {$stopped - $stopping:.1f} s after SIGTERM with status $status')"
du -sh --exclude=source --exclude=bundle "$root" | sed 's/\t.*/ in all/'
exit "$status"
