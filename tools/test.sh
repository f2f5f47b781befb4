#!/bin/sh
# Installs what is missing, builds, and runs all tests.
# usage: tools/test.sh [options of `meson setup`, such as -Dwerror=true]
set -eu
cd "$(dirname "$0")/.."
. tools/packages.sh

need_packages $BUILD_PACKAGES $TEST_PACKAGES
say "Configuring and building (build/)"
if [ -f build/build.ninja ]; then
  [ $# = 0 ] || meson configure build "$@"
else
  meson setup build "$@"
fi
ninja -C build
say "Running the tests"
meson test -C build --no-rebuild --print-errorlogs
