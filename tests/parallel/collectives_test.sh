#!/bin/sh
# The example of two processes that sum a tensor over Gloo.
# usage: collectives_test.sh COLLECTIVES
set -eu
out=$("$1" | sort | tr '\n' ';')
[ "$out" = "0: tensor([2, 4, 6, 8]);1: tensor([2, 4, 6, 8]);" ] || { echo "printed: $out"; exit 1; }
