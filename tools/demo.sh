#!/bin/sh
# Installs what is missing, builds, trains one epoch on Fashion-MNIST on one device, with DataParallel on 2 devices and
# with DistributedDataParallel on 2 processes, and compares the three.
# usage: tools/demo.sh [options of examples/fashion_mnist, such as --epochs 5]
set -eu
cd "$(dirname "$0")/.."
. tools/packages.sh

need_packages $BUILD_PACKAGES
say "Configuring and building (build/)"
[ -f build/build.ninja ] || meson setup $FRESH_BUILD build >build-setup.log 2>&1 || { cat build-setup.log; exit 1; }
rm -f build-setup.log
ninja -C build examples/fashion_mnist

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
train() {
  name=$1; shift
  say "Training: $name"
  build/examples/fashion_mnist --epochs 1 --batch-size 256 --optimizer adam --threads 2 --log "$logs/$name.jsonl" "$@"
}
# One thread for each device and process, so that the three differ in nothing but how they are parallel.
train "one device, 1 thread" --threads 1 "$@"
train "DataParallel, 2 devices" --parallel dp --devices 2 "$@"
train "DistributedDataParallel, 2 processes" --parallel ddp --nproc 2 "$@"

say "Comparison"
python3 tools/compare_logs.py "$logs/one device, 1 thread.jsonl" "$logs/DataParallel, 2 devices.jsonl" \
  "$logs/DistributedDataParallel, 2 processes.jsonl"
