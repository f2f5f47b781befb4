#!/bin/bash
# On a machine with an NVIDIA GPU: builds for that GPU, runs the tests of CUDA on it, trains, compares step times with
# PyTorch's, and prints one table last. Each step has a time limit, and one that fails does not end the rest; all of it
# takes less than 8 minutes. With TANDEM_CUDA_MODULE set (the module over the double, say) it takes that module, the build
# that it is in, and small sizes.
#
# usage: tools/gpu_check.sh [--build DIR] [--packages DIR]
#        tools/gpu_check.sh --pack DIR
#   --build DIR     where to build (build-gpu)
#   --packages DIR  what --pack has made, where packages cannot be installed
#   --pack DIR      on Debian 12 with network: unpacks the packages that the build needs into DIR, for another machine
set -u
cd "$(dirname "$0")/.." || exit 1
root=$PWD build=$PWD/build-gpu packages="" pack=""
while [ $# -gt 0 ]; do
  case "$1" in
    --build) build=$(realpath -m "$2"); shift 2 ;;
    --packages) packages=$(realpath "$2") || exit 1; shift 2 ;;
    --pack) pack=$(realpath -m "$2"); shift 2 ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done
. tools/packages.sh

if [ -n "$pack" ]; then
  set -e
  need="libfmt-dev libfmt9 libeigen3-dev nlohmann-json3-dev libasio-dev libssl-dev libssl3 libcli11-dev doctest-dev
        dataset-fashion-mnist pkgconf-bin libpkgconf3 ninja-build"
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  # shellcheck disable=SC2086
  (cd "$folder" && apt-get download -qq $need)
  mkdir -p "$pack"
  for file in "$folder"/*.deb; do dpkg -x "$file" "$pack"; done
  rm -rf "$pack"/usr/share/doc "$pack"/usr/share/man "$pack"/usr/share/lintian
  find "$pack" -xtype l -delete  # links to packages that are not there
  find "$pack" -name '*.a' -delete
  say "$(du -sh "$pack" | cut -f1) in $pack"
  exit 0
fi

limit_of_all=465  # seconds
logs=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check-XXXXXX")
rows=() failures=0

# step NAME SECONDS COMMAND...: runs it, and adds a row; its result is the command's.
step() {
  local name=$1 limit=$2 status start=$SECONDS left=$((limit_of_all - SECONDS)) what
  local log="$logs/${name// /_}.log"
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 3 ]; then
    rows+=("$(printf '%-34s %-8s %5s  %s' "$name" "not run" "" "no time is left")")
    return 1
  fi
  say "$name (at most $limit s)"
  timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null
  status=$?
  tail -n 12 "$log"
  case "$status" in
    0) what="passed" ;;
    124 | 137) what="too slow" ;;
    *) what="failed" ;;
  esac
  local last
  last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | tr '\r' '\n' | tail -n 1 | cut -c1-90)
  [ "$status" = 0 ] || { last="[$status] $last"; failures=$((failures + 1)); }
  rows+=("$(printf '%-34s %-8s %5d  %s' "$name" "$what" $((SECONDS - start)) "$last")")
  return "$status"
}
skip() { rows+=("$(printf '%-34s %-8s %5s  %s' "$1" "skipped" "" "$2")"); }

# What there is.
export PATH="$PATH:/usr/local/cuda/bin"
double=""
[ -n "${TANDEM_CUDA_MODULE:-}" ] && double=1
gpu="" arch=""
if [ -z "$double" ]; then
  gpu=$(nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -n 1)
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
  [ -n "$arch" ] || { echo "nvidia-smi finds no GPU; set TANDEM_CUDA_MODULE to try the steps over the double"; exit 1; }
else
  gpu="the module $TANDEM_CUDA_MODULE"
fi
say "$gpu"

# What the build needs.
meson_options=(-Dtests=enabled -Dexamples=enabled -Dbench=enabled -Dmpi=disabled -Dgloo=disabled)
data=()
if [ -n "$packages" ]; then
  lib=$packages/usr/lib/x86_64-linux-gnu
  export PATH="$packages/usr/bin:$PATH" CMAKE_PREFIX_PATH="$packages/usr"
  export CPLUS_INCLUDE_PATH="$packages/usr/include:$packages/usr/include/x86_64-linux-gnu"
  export LIBRARY_PATH="$lib" LDFLAGS="-L$lib -Wl,-rpath,$lib -Wl,-rpath-link,$lib"
  export PKG_CONFIG_SYSROOT_DIR="$packages" PKG_CONFIG_LIBDIR="$lib/pkgconfig:$packages/usr/share/pkgconfig"
  if ! command -v pkg-config >/dev/null || [ "$(command -v pkg-config)" = "$packages/usr/bin/pkg-config" ]; then
    mkdir -p "$logs/bin"
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' "$lib" "$packages/usr/bin/pkgconf" >"$logs/bin/pkg-config"
    chmod +x "$logs/bin/pkg-config"
    export PATH="$logs/bin:$PATH"
  fi
  meson_options+=(-Dgzip=disabled -Donednn=disabled)
elif [ -z "$double" ]; then
  # shellcheck disable=SC2086
  step "packages" 90 sh -c '. tools/packages.sh; need_packages "$@"' sh g++ meson ninja-build pkg-config libfmt-dev \
    libeigen3-dev nlohmann-json3-dev libasio-dev libssl-dev libcli11-dev zlib1g-dev doctest-dev dataset-fashion-mnist
fi
if ! command -v meson >/dev/null; then
  step "meson by pip" 30 python3 -m pip install -q --user meson ninja
  export PATH="$PATH:$HOME/.local/bin"
fi
if [ -n "$packages" ]; then
  mkdir "$logs/data"
  for file in "$packages"/usr/share/datasets/fashion-mnist/*.gz; do gunzip -c "$file" >"$logs/data/$(basename "$file" .gz)"; done
  data=(--data "$logs/data")
elif [ -d /usr/share/datasets/fashion-mnist ]; then
  data=(--data /usr/share/datasets/fashion-mnist)
fi
made_data() {  # images of ten kinds with noise, where the real ones are not there, or would take too long
  python3 - "$logs/data" "$1" <<'PYTHON'
import pathlib, random, sys
folder, rows = pathlib.Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir()
for name, n in (("train", rows), ("t10k", rows // 6 + 1)):
    labels = bytes(i % 10 for i in range(n))
    rng = random.Random(name)
    images = b"".join(bytes(rng.randrange(60) + (150 if 78 * k <= j < 78 * k + 78 else 0) for j in range(784)) for k in labels)
    for kind, sizes, values in (("images-idx3", (n, 28, 28), images), ("labels-idx1", (n,), labels)):
        head = bytes([0, 0, 8, len(sizes)]) + b"".join(s.to_bytes(4, "big") for s in sizes)
        (folder / f"{name}-{kind}-ubyte").write_bytes(head + values)
PYTHON
}
if [ -n "$double" ]; then
  made_data 120 && data=(--data "$logs/data")
elif [ ${#data[@]} = 0 ]; then
  made_data 6000 && data=(--data "$logs/data")
fi

# The build: what is run below, and nothing else.
programs="tests/autograd/autograd_test tests/cuda/cuda_test examples/fashion_mnist bench/cuda_step tandem-run"
if [ -n "$double" ]; then
  build=$(cd "$(dirname "$TANDEM_CUDA_MODULE")/../.." && pwd)
  # shellcheck disable=SC2086
  step "build" 300 ninja -C "$build" $programs
else
  again=""
  [ -f "$build/build.ninja" ] && again="--reconfigure"
  # shellcheck disable=SC2086
  step "configure" 60 meson setup $again "$build" -Dcuda=enabled "-Dgpu_arch=$arch" "${meson_options[@]}"
  modules="libtandem_cuda.so"
  ninja -C "$build" -t targets all 2>/dev/null | grep -q '^libtandem_nccl.so:' && modules="$modules libtandem_nccl.so"
  # shellcheck disable=SC2086
  step "build for sm_$arch" 210 ninja -C "$build" $modules $programs
fi
cd "$build" || exit 1

# Tests on the device.
step "tests of CUDA" 60 tests/cuda/cuda_test
step "every operation against the CPU" 60 tests/autograd/autograd_test '--test-case=*CUDA*'

# Training.
train=(examples/fashion_mnist --epochs 1 --optimizer adam "${data[@]}")
rows_a_step=64
[ -n "$double" ] && rows_a_step=30
step "training, the CPU" 40 "${train[@]}" --batch-size "$rows_a_step"
step "training, one GPU" 40 "${train[@]}" --batch-size "$rows_a_step" --device cuda
step "training, one GPU, graphs" 40 "${train[@]}" --batch-size "$rows_a_step" --device cuda --graph
count=$(nvidia-smi -L 2>/dev/null | wc -l)
if [ -n "$double" ] || [ "$count" -gt 1 ]; then
  step "training, DataParallel on 2 GPUs" 40 "${train[@]}" --batch-size "$rows_a_step" --device cuda --parallel dp --devices 2
else
  skip "training, DataParallel on 2 GPUs" "there is one"
fi
# Ranks on one GPU: NCCL refuses two of one host, so each is given a host of its own.
# shellcheck disable=SC2016
NCCL_SOCKET_IFNAME=lo NCCL_MAX_CTAS=2 NCCL_NVLS_ENABLE=0 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} \
  step "training, 2 ranks on one GPU" 60 ./tandem-run -n 2 sh -c 'NCCL_HOSTID=host$RANK exec "$0" "$@"' \
  "${train[@]}" --batch-size "$rows_a_step" --device cuda --parallel ddp

# Step times.
sizes=(--width "512,4096" --batch-size "64,4096" --optimizer "sgd,adam")
[ -n "$double" ] && sizes=(--width 16 --batch-size 8 --optimizer "sgd,adam" --rounds 3 --round-ms 20)
step "step times, Tandem" 60 bench/cuda_step "${sizes[@]}" --graph --json "$logs/ours.json"
torch=""
for python in python3 /opt/*/bin/python3 /opt/*/.venv/bin/python3; do
  if "$python" -c 'import torch' 2>/dev/null; then torch=$python; break; fi
done
if [ -n "$double" ]; then
  skip "step times, PyTorch" "not over a double"
elif [ -n "$torch" ]; then
  step "step times, PyTorch" 60 "$torch" "$root/bench/peers/pytorch_cuda.py" "${sizes[@]}" --json "$logs/pytorch.json"
else
  skip "step times, PyTorch" "PyTorch is not installed"
fi

# Addresses and races in kernels.
sanitizer=$(command -v compute-sanitizer)
if [ -n "$double" ]; then
  skip "compute-sanitizer" "not over a double"
elif [ -n "$sanitizer" ]; then
  short=(tests/cuda/cuda_test '--source-file=*loss_test.cpp,*reduce_test.cpp,*optimizer_test.cpp')
  step "compute-sanitizer, addresses" 60 "$sanitizer" --tool memcheck --error-exitcode 9 "${short[@]}"
  step "compute-sanitizer, races" 60 "$sanitizer" --tool racecheck --error-exitcode 9 "${short[@]}"
else
  skip "compute-sanitizer" "it is not installed"
fi

say "Result after $SECONDS s: $gpu; logs in $logs"
printf '%-34s %-8s %5s  %s\n' step result s "last line"
printf '%s\n' "${rows[@]}"
python3 - "$logs" <<'PYTHON'
import json, pathlib, sys
times = {}
for name in ("ours", "pytorch"):
    path = pathlib.Path(sys.argv[1]) / f"{name}.json"
    for r in json.loads(path.read_text()) if path.exists() else []:
        times.setdefault((r["width"], r["batch_size"], r["optimizer"]), {})[r["way"]] = r["median_us"]
ways = ("plain", "graph", "eager", "captured")
ratio = lambda t, a, b: f"{t[a] / t[b]:.2f}" if a in t and b in t else "-"
print("\nTimes of a step in us. PyTorch's are eager and captured; a ratio above 1 says that Tandem is faster.")
print(f"{'width':>6} {'batch':>6} {'optimizer':>9}" + "".join(f"{w:>10}" for w in ways)
      + f"{'eager/plain':>13}{'eager/graph':>13}{'captured/graph':>16}")
for (width, batch, optimizer), t in times.items():
    print(f"{width:>6} {batch:>6} {optimizer:>9}" + "".join(f"{t[w]:>10.1f}" if w in t else f"{'-':>10}" for w in ways)
          + f"{ratio(t, 'eager', 'plain'):>13}{ratio(t, 'eager', 'graph'):>13}{ratio(t, 'captured', 'graph'):>16}")
PYTHON
[ "$failures" = 0 ]
