#!/bin/sh
# Installs what is missing, builds, and runs all tests.
# usage: tools/test.sh [options of `meson setup`, such as -Dwerror=true]
set -eu
cd "$(dirname "$0")/.."
. tools/packages.sh

need_packages $BUILD_PACKAGES $TEST_PACKAGES
say "Configuring and building (build/)"
how=$FRESH_BUILD
[ -f build/build.ninja ] && how="--reconfigure"  # it may have been configured before the tests' packages were there
meson setup $how build -Dtests=enabled -Dexamples=enabled "$@"
ninja -C build
say "Running the tests"
# Many tests wait for processes more than they compute, so several run at once; threads then had better not spin.
export OMP_WAIT_POLICY=passive
MESON_TESTTHREADS=${MESON_TESTTHREADS:-$((2 * $(nproc)))} meson test -C build --no-rebuild --print-errorlogs
