#!/bin/sh
# Repeats the tests of everything that can go wrong between processes, one after the other, in a build folder that is
# ready. Stops at the first failure with its log, and ends with a line that says how often all have passed.
# usage: tools/soak.sh [TIMES [BUILD]]   (20 times, build/)
set -eu
cd "$(dirname "$0")/.."
times=${1:-20} build=${2:-build}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
tests=$(meson test -C "$build" --no-rebuild --list 2>/dev/null | sed 's|.* / ||' |
  grep -E '^(failures .*|resume after restarts|shm|gloo.*|mesh|comm|store.*|rendezvous|start.*|tandem-run|nodes|spawn|hosts|mpi|distributed .*)$')
[ -n "$tests" ] || { echo "$build has no such tests; build it with -Dtests=enabled"; exit 1; }

i=0
while [ "$i" -lt "$times" ]; do
  i=$((i + 1))
  printf '%s' "$tests" | {
    while read -r name || [ -n "$name" ]; do
      start=$(date +%s)
      if ! meson test -C "$build" --no-rebuild --print-errorlogs "$name" >"$log" 2>&1 </dev/null; then
        cat "$log"
        echo "soak: '$name' failed in round $i of $times"
        exit 1
      fi
      echo "round $i of $times: $name ok ($(($(date +%s) - start)) s)"
    done
  } || exit 1
done
echo "soak: $(echo "$tests" | wc -l) tests passed $times times in a row"
