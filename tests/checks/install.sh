#!/bin/sh
# Installs into a temporary prefix and compiles the examples against it as a user would: by pkg-config and by CMake.
# usage: install.sh SOURCE_ROOT BUILD_ROOT CXX
set -eu
source=$1 build=$2 cxx=$3
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
meson install -C "$build" --no-rebuild --destdir "$prefix" >"$prefix/log" 2>&1 || { cat "$prefix/log"; exit 1; }
pc=$(find "$prefix" -name tandem.pc)
root=${pc%/lib*/pkgconfig/tandem.pc}
root=${root%/lib*}
# The prefix in the file is the real one; a staged installation overrides it.
export PKG_CONFIG_PATH="$(dirname "$pc")"
library=$(dirname "$PKG_CONFIG_PATH")
flags=$(pkg-config --define-variable=prefix="$root" --cflags --libs tandem)

programs="data_parallel_loss custom_module ddp_demo"
for program in $programs; do
  # shellcheck disable=SC2086
  $cxx -Wall -Wextra -Werror "$source/examples/$program.cpp" -o "$prefix/$program" $flags -Wl,-rpath,"$library"
  echo "pkg-config: $program compiles"
done
(cd "$prefix" && TANDEM_CPU_DEVICES=2 ./data_parallel_loss && TANDEM_CPU_DEVICES=2 ./custom_module && ./ddp_demo)
echo "pkg-config: the programs run"
# shellcheck disable=SC2086
$cxx "$source/examples/data_parallel_loss.cpp" -o "$prefix/static" -std=c++20 -I"$root/include" "$library/libtandem.a" \
  $(pkg-config --define-variable=prefix="$root" --static --libs tandem | sed 's/-ltandem//; s/-L[^ ]*//')
"$prefix/static"
echo "static library: links and runs"

if [ -e "$build/libtandem_mpi.so" ] && command -v mpirun >/dev/null 2>&1; then
  # A rank of a job, linked with either library. The static one has no folder in which to look for the module.
  program=$source/tests/parallel/rendezvous_program.cpp
  # shellcheck disable=SC2086
  $cxx "$program" -o "$prefix/rank" $flags -Wl,-rpath,"$library"
  # shellcheck disable=SC2086
  $cxx "$program" -o "$prefix/static_rank" -std=c++20 -I"$root/include" "$library/libtandem.a" \
    $(pkg-config --define-variable=prefix="$root" --static --libs tandem | sed 's/-ltandem//; s/-L[^ ]*//')
  launch="mpirun --allow-run-as-root --oversubscribe -n 2"
  $launch "$prefix/rank" env:// mpi
  TANDEM_MPI_MODULE=$library/libtandem_mpi.so $launch "$prefix/static_rank" env:// mpi
  echo "MPI: the module is found"
fi

if ! command -v cmake >/dev/null 2>&1; then
  echo "cmake is not installed: its package is not tried"
  exit 1
fi
mkdir "$prefix/user"
cat >"$prefix/user/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.18)
project(user CXX)
find_package(Tandem 0.1 REQUIRED)
add_executable(demo $source/examples/data_parallel_loss.cpp)
target_link_libraries(demo PRIVATE Tandem::tandem)
CMAKE
cmake -G Ninja -S "$prefix/user" -B "$prefix/user/build" -DCMAKE_CXX_COMPILER="${cxx##* }" -DCMAKE_PREFIX_PATH="$root" >/dev/null
cmake --build "$prefix/user/build" >/dev/null
"$prefix/user/build/demo"
echo "CMake: find_package(Tandem) works"

mkdir -p "$prefix/sub/subprojects"
ln -s "$source" "$prefix/sub/subprojects/tandem"
cp "$source/examples/data_parallel_loss.cpp" "$prefix/sub/demo.cpp"
cat >"$prefix/sub/meson.build" <<'MESON'
project('user', 'cpp', default_options: ['cpp_std=c++20'])
tandem = subproject('tandem', default_options: ['tests=disabled', 'examples=disabled', 'bench=disabled'])
executable('demo', 'demo.cpp', dependencies: tandem.get_variable('tandem_dep'))
MESON
CXX=$cxx meson setup "$prefix/sub/build" "$prefix/sub" >"$prefix/log" 2>&1 || { cat "$prefix/log"; exit 1; }
echo "Meson: configures as a subproject"
