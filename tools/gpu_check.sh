#!/bin/bash
# On a machine with an NVIDIA GPU: builds for that GPU, runs the tests of CUDA on it, trains, compares step times with
# PyTorch's, and prints one table last, whatever happened before. Each step has a time limit, and one that fails does not
# end the rest; all of it takes less than 8 minutes. The exit code is 0 where no step has failed.
#
# usage: tools/gpu_check.sh [--build DIR] [--packages DIR]
#        tools/gpu_check.sh --pack DIR
#   --build DIR     where to build (build-gpu)
#   --packages DIR  what --pack has made, where packages cannot be installed
#   --pack DIR      on Debian 12 with network: unpacks the packages that the build needs into DIR, for another machine
#
# It needs nvcc, g++, Python and Meson. NCCL, PyTorch and compute-sanitizer are taken where they are; what is left out
# without them is a line of the table.
#
# With TANDEM_CUDA_MODULE set, no GPU is needed: the steps are tried on that module (the one over the double, in
# tests/cuda of a build folder) with the programs of its build folder and small sizes.
set -u
[ -n "${TANDEM_CUDA_MODULE:-}" ] && TANDEM_CUDA_MODULE=$(realpath "$TANDEM_CUDA_MODULE")
[ -n "${TANDEM_NCCL_MODULE:-}" ] && TANDEM_NCCL_MODULE=$(realpath "$TANDEM_NCCL_MODULE")
build="" packages="" pack=""
while [ $# -gt 0 ]; do
  case "$1 $#" in
    "--build 1" | "--packages 1" | "--pack 1") echo "$1 needs a folder"; exit 2 ;;
    "--build "*) build=$(realpath -m "$2"); shift 2 ;;
    "--packages "*) packages=$(realpath -e "$2") || exit 2; shift 2 ;;
    "--pack "*) pack=$(realpath -m "$2"); shift 2 ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; case "$1" in -h | --help) exit 0 ;; *) exit 2 ;; esac ;;
  esac
done
cd "$(dirname "$0")/.." || exit 1
root=$PWD
[ -n "$build" ] || build=$root/build-gpu
. tools/packages.sh

if [ -n "$pack" ]; then
  set -e
  need="libfmt-dev libfmt9 libeigen3-dev nlohmann-json3-dev libasio-dev libssl-dev libssl3 libcli11-dev doctest-dev
        dataset-fashion-mnist pkgconf-bin libpkgconf3 meson ninja-build"
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  # shellcheck disable=SC2086
  (cd "$folder" && apt-get download -qq $need)
  mkdir -p "$pack"
  for file in "$folder"/*.deb; do dpkg -x "$file" "$pack"; done
  rm -rf "$pack"/usr/share/doc "$pack"/usr/share/man "$pack"/usr/share/lintian
  # What links to packages that are not there, or is not linked with.
  find "$pack" -xtype l -delete
  find "$pack" -name '*.a' -delete
  rm -rf "$pack"/usr/include/eigen3/unsupported
  printf 'Name: doctest\nDescription: tests\nVersion: 2\nCflags: -I/usr/include\n' >"$pack/usr/share/pkgconfig/doctest.pc"
  say "$(du -sh "$pack" | cut -f1) in $pack"
  exit 0
fi

limit_of_all=465  # seconds
logs=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check-XXXXXX") || exit 1
rows=() failures=0 running="" gpu="" at_end=""

# row NAME RESULT SECONDS TEXT: a line of the table.
row() { rows+=("$(printf '%-34s %-8s %5s  %s' "$1" "$2" "$3" "$4")"); }
skip() { row "$1" "left out" "" "$2"; }

# step NAME SECONDS COMMAND...: runs it, and adds a row; its result is the command's.
step() {
  local name=$1 limit=$2 status start=$SECONDS left=$((limit_of_all - SECONDS)) what last
  local log="$logs/${name//[ ,]/_}.log"
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 3 ]; then
    row "$name" "not run" "" "no time is left"
    return 1
  fi
  if ! command -v -- "$1" >/dev/null; then
    failures=$((failures + 1))
    row "$name" "not run" "" "there is no $1"
    return 1
  fi
  say "$name (at most $limit s)"
  timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null &
  running=$!  # in the background, so that an end of this script is noticed
  wait "$running"
  status=$?
  running=""
  case "$status" in
    0) what="passed" ;;
    124 | 137) what="too slow" ;;
    *) what="failed" ;;
  esac
  tail -n "$([ "$status" = 0 ] && echo 12 || echo 80)" "$log" | cut -c1-300
  last=$(tr '\r' '\n' <"$log" | grep -av '^[[:space:]]*$' | tail -n 1 | cut -c1-90)
  [ "$status" = 0 ] || { last="[$status] $last"; failures=$((failures + 1)); }
  row "$name" "$what" $((SECONDS - start)) "$last"
  return "$status"
}

# The table. It comes also when this script is ended or fails.
finish() {
  trap - EXIT
  trap '' INT TERM HUP
  [ -n "$running" ] && kill "$running" 2>/dev/null
  [ -n "$at_end" ] || { failures=$((failures + 1)); row "the rest" "not run" "" "the script was ended"; }
  say "Result after $SECONDS s: ${gpu:-no GPU}; logs in $logs"
  printf '%-34s %-8s %5s  %s\n' step result s "last line"
  printf '%s\n' "${rows[@]}"
  timeout 20 python3 - "$logs" <<'PYTHON'
import json, pathlib, sys
times = {}
for name in ("ours", "pytorch"):
    path = pathlib.Path(sys.argv[1]) / f"{name}.json"
    for r in json.loads(path.read_text()) if path.exists() else []:
        times.setdefault((r["width"], r["batch_size"], r["optimizer"]), {})[r["way"]] = r["median_us"]
ways = ("plain", "graph", "eager", "captured")
ratio = lambda t, a, b: f"{t[a] / t[b]:.2f}" if a in t and b in t else "-"
if times:
    print("\nTimes of a step in us. PyTorch's are eager and captured; a ratio above 1 says that Tandem is faster.")
    print(f"{'width':>6} {'batch':>6} {'optimizer':>9}" + "".join(f"{w:>10}" for w in ways)
          + f"{'eager/plain':>13}{'eager/graph':>13}{'captured/graph':>16}")
for (width, batch, optimizer), t in times.items():
    print(f"{width:>6} {batch:>6} {optimizer:>9}" + "".join(f"{t[w]:>10.1f}" if w in t else f"{'-':>10}" for w in ways)
          + f"{ratio(t, 'eager', 'plain'):>13}{ratio(t, 'eager', 'graph'):>13}{ratio(t, 'captured', 'graph'):>16}")
PYTHON
  exit $((failures > 0))
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

# What there is.
export PATH="$PATH:/usr/local/cuda/bin:/usr/local/nvidia/bin"
double=""
[ -n "${TANDEM_CUDA_MODULE:-}" ] && double=1
arch=""
if [ -z "$double" ]; then
  gpu=$(timeout 30 nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -n 1)
  arch=$(printf '%s' "$gpu" | cut -d, -f2 | tr -cd 0-9)
  if [ -z "$arch" ]; then
    row "the GPU" "failed" "" "nvidia-smi finds none; set TANDEM_CUDA_MODULE to try the steps over the double"
    exit 1
  fi
else
  gpu="the module $TANDEM_CUDA_MODULE"
  near=$(dirname "$TANDEM_CUDA_MODULE")/libtandem_nccl.so
  export TANDEM_CUDA_MODULE TANDEM_NCCL_MODULE="${TANDEM_NCCL_MODULE:-$near}"
  export TANDEM_CUDA_DOUBLE_DEVICES="${TANDEM_CUDA_DOUBLE_DEVICES:-4}"
fi
say "$gpu"

# What the build needs.
mkdir -p "$logs/bin"
data=()
use_libraries() {  # of a folder, when programs are linked and when they run
  export LIBRARY_PATH="$1${LIBRARY_PATH:+:$LIBRARY_PATH}"
  export LDFLAGS="${LDFLAGS:-} -L$1 -Wl,-rpath,$1 -Wl,-rpath-link,$1"
}
meson_options=(-Dmpi=disabled -Dgloo=disabled)
if [ -n "$packages" ]; then
  lib=$packages/usr/lib/x86_64-linux-gnu
  export PATH="$PATH:$packages/usr/bin" CMAKE_PREFIX_PATH="$packages/usr"
  export CPLUS_INCLUDE_PATH="$packages/usr/include:$packages/usr/include/x86_64-linux-gnu"
  use_libraries "$lib"
  export PKG_CONFIG_SYSROOT_DIR="$packages" PKG_CONFIG_LIBDIR="$lib/pkgconfig:$packages/usr/share/pkgconfig"
  if ! command -v pkg-config >/dev/null; then
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' "$lib" "$packages/usr/bin/pkgconf" >"$logs/bin/pkg-config"
  fi
  if ! PATH=${PATH%":$packages/usr/bin"} command -v meson >/dev/null; then
    printf '#!/bin/sh\nPYTHONPATH="%s" exec python3 "%s" "$@"\n' "$packages/usr/lib/python3/dist-packages" \
      "$packages/usr/bin/meson" >"$logs/bin/meson"
  fi
  chmod -f +x "$logs"/bin/*
  export PATH="$logs/bin:$PATH"
  meson_options+=(-Dgzip=disabled -Donednn=disabled)
elif [ -z "$double" ]; then
  # Where they cannot be had, that is no failure: the configuration says what is missing.
  # shellcheck disable=SC2086
  step "packages" 60 sh -c '. tools/packages.sh; need_packages "$@"' sh g++ meson ninja-build pkg-config libfmt-dev \
    libeigen3-dev nlohmann-json3-dev libasio-dev libssl-dev libcli11-dev zlib1g-dev doctest-dev dataset-fashion-mnist ||
    failures=0
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

# NCCL, where the toolkit has none: that of PyTorch's wheels.
if [ -z "$double" ]; then
  toolkit=$(nvcc --dryrun -x cu /dev/null -c 2>&1 | sed -n 's/^#\$ TOP=//p')
  if ! echo '#include <nccl.h>' | g++ -E -x c++ "-I$toolkit/include" - >/dev/null 2>&1; then
    wheel=$(timeout 30 python3 -c 'import importlib.util as u; print(u.find_spec("nvidia.nccl").submodule_search_locations[0])' 2>/dev/null)
    if [ -f "$wheel/include/nccl.h" ]; then
      mkdir -p "$build/nccl"
      ln -sf "$wheel/lib/libnccl.so.2" "$build/nccl/libnccl.so.2"
      ln -sf libnccl.so.2 "$build/nccl/libnccl.so"
      export CPLUS_INCLUDE_PATH="${CPLUS_INCLUDE_PATH:+$CPLUS_INCLUDE_PATH:}$wheel/include"
      use_libraries "$build/nccl"
    fi
  fi
fi

# The build: what is run below, and nothing else.
wanted="libtandem_cuda.so libtandem_nccl.so tandem-run tests/autograd/autograd_test tests/cuda/cuda_test examples/fashion_mnist
        bench/cuda_step"
if [ -n "$double" ]; then
  build=$(cd "$(dirname "$TANDEM_CUDA_MODULE")/../.." && pwd)
  wanted="${wanted#* * } tests/cuda/libtandem_cuda.so tests/cuda/libtandem_nccl.so"
else
  again=""
  [ -f "$build/build.ninja" ] && again="--reconfigure"
  # shellcheck disable=SC2086
  step "configure" 90 meson setup $again "$build" -Dcuda=enabled "-Dgpu_arch=$arch" "${meson_options[@]}"
fi
targets=()
known=$(ninja -C "$build" -t targets all 2>/dev/null | sed 's/: .*//')
for target in $wanted; do
  if printf '%s\n' "$known" | grep -qxF "$target"; then targets+=("$target"); else skip "$target" "not in this build"; fi
done
[ ${#targets[@]} -gt 0 ] && step "build${arch:+ for sm_$arch}" 270 ninja -k 0 -C "$build" "${targets[@]}"
cd "$build" || exit 1

# Tests on the device.
step "tests of CUDA" $((double ? 180 : 60)) tests/cuda/cuda_test
step "every operation against the CPU" 60 tests/autograd/autograd_test '--test-case=*CUDA*' --no-skip

# Training.
train=(examples/fashion_mnist --epochs 1 --optimizer adam "${data[@]}")
rows_a_step=64 rows_of_ranks=600
[ -n "$double" ] && rows_a_step=30 rows_of_ranks=30
logged() { echo "--log $logs/$1.jsonl"; }
# shellcheck disable=SC2046
{
  step "training, the CPU" 40 "${train[@]}" --batch-size $rows_a_step $(logged cpu)
  step "training, one GPU" 40 "${train[@]}" --batch-size $rows_a_step --device cuda $(logged gpu)
  step "training, one GPU, graphs" 40 "${train[@]}" --batch-size $rows_a_step --device cuda --graph $(logged graph)
}
step "losses on the GPU are the CPU's" 20 python3 -c '
import json, pathlib, sys
loss = {}
for name in ("cpu", "gpu", "graph"):
    loss[name] = json.loads((pathlib.Path(sys.argv[1]) / f"{name}.jsonl").read_text().splitlines()[-1])["train_loss"]
print("  ".join(f"{name}: {value:.4f}" for name, value in loss.items()))
sys.exit(any(abs(value - loss["cpu"]) > 0.02 for value in loss.values()))
' "$logs"
if [ -n "$double" ]; then count=$TANDEM_CUDA_DOUBLE_DEVICES; else count=$(timeout 30 nvidia-smi -L 2>/dev/null | wc -l); fi
if [ "$count" -gt 1 ]; then
  step "training, DataParallel on 2 GPUs" 40 "${train[@]}" --batch-size $rows_a_step --device cuda --parallel dp --devices 2
else
  skip "training, DataParallel on 2 GPUs" "there is one"
fi

# Step times.
sizes=(--width "512,4096" --batch-size "64,4096" --optimizer "sgd,adam")
[ -n "$double" ] && sizes=(--width 16 --batch-size 8 --optimizer "sgd,adam" --rounds 3 --round-ms 20)
step "step times, Tandem" 60 bench/cuda_step "${sizes[@]}" --graph --json "$logs/ours.json"
torch=""
for python in python3 /opt/*/bin/python3 /opt/*/.venv/bin/python3; do
  timeout 20 "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null || continue
  torch=$python
  break
done
if [ -n "$double" ]; then
  skip "step times, PyTorch" "not over a double"
elif [ -n "$torch" ]; then
  step "step times, PyTorch" 75 "$torch" "$root/bench/peers/pytorch_cuda.py" "${sizes[@]}" --json "$logs/pytorch.json"
else
  skip "step times, PyTorch" "PyTorch is not installed"
fi

# Ranks on one GPU: NCCL refuses two of one host, so each is given a host of its own.
if [ -f libtandem_nccl.so ] || [ -f "${TANDEM_NCCL_MODULE:-}" ]; then
  # shellcheck disable=SC2016
  NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_MAX_CTAS=2 NCCL_NVLS_ENABLE=0 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} \
    step "training, 2 ranks on one GPU" 60 ./tandem-run -n 2 sh -c 'NCCL_HOSTID=host$RANK exec "$0" "$@"' \
    "${train[@]}" --batch-size $rows_of_ranks --device cuda --parallel ddp --backend nccl
else
  skip "training, 2 ranks on one GPU" "no libtandem_nccl.so: NCCL's header or library was not found, or see the build"
fi

# Addresses and races in kernels.
sanitizer=$(command -v compute-sanitizer)
if [ -n "$double" ]; then
  skip "compute-sanitizer" "not over a double"
elif [ -z "$sanitizer" ]; then
  skip "compute-sanitizer" "it is not installed"
else
  for tool in memcheck racecheck; do
    # What calls answer is no finding: some are made to see whether they work.
    options=(--error-exitcode 9)
    [ $tool = memcheck ] && options+=(--report-api-errors no)
    step "compute-sanitizer, $tool" 60 "$sanitizer" --tool $tool "${options[@]}" tests/cuda/cuda_test \
      '--source-file=*loss_test.cpp,*reduce_test.cpp,*optimizer_test.cpp'
  done
fi
at_end=1
