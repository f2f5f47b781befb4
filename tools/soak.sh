#!/bin/sh
# Repeats the tests of everything that can go wrong between processes, one after the other, in a build folder that is
# ready. Stops at the first failure with its log, and ends with a line that says how often all have passed.
# usage: tools/soak.sh [TIMES [BUILD [TESTS]]]   (20 times, build/, all; TESTS is a pattern of names: 'failures .*|mpi')
set -eu
cd "$(dirname "$0")/.."
times=${1:-20} build=${2:-build} wanted=${3:-.*}
log=$(mktemp) skipped=$(mktemp)
trap 'rm -f "$log" "$skipped"' EXIT
tests=$(meson test -C "$build" --no-rebuild --list 2>/dev/null | sed 's|.* / ||' |
  grep -E '^(failures .*|resume after restarts|shm|gloo.*|mesh|comm|store.*|rendezvous|start.*|tandem-run|nodes|spawn|hosts|mpi|distributed .*)$' |
  grep -E "^($wanted)\$" || true)
[ -n "$tests" ] || { echo "$build has no such tests; make it with: meson setup $build && ninja -C $build" >&2; exit 1; }

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
      result=ok
      if grep -q '^Skipped: *[1-9]' "$log"; then result=skipped && echo "$name" >>"$skipped"; fi
      echo "round $i of $times: $name $result ($(($(date +%s) - start)) s)"
    done
  } || exit 1
done
skips=$(sort -u "$skipped" | wc -l)
echo "soak: $(($(echo "$tests" | wc -l) - skips)) tests passed $times times in a row, $skips skipped"
