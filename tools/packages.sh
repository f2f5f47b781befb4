# Sourced by demo.sh, test.sh and gpu_check.sh: installs what is missing, on Debian 12, and how builds are set up.
# usage: . tools/packages.sh; need_packages PACKAGE...

say() { printf '\n== %s\n' "$*"; }

# The packages that every build needs, and those that make it fast or complete.
BUILD_PACKAGES="g++ meson ninja-build pkg-config libfmt-dev libeigen3-dev nlohmann-json3-dev libasio-dev libssl-dev \
libcli11-dev libdnnl-dev libgloo-dev zlib1g-dev dataset-fashion-mnist"
TEST_PACKAGES="doctest-dev cmake iproute2 libopenmpi-dev openmpi-bin openssl"

# How a build folder that is not there is set up, so that it takes minutes: several files are compiled as one, and the
# kernels for CUDA for sm_80 alone, which newer GPUs compile for themselves.
FRESH_BUILD="-Dunity=on -Dunity_size=16 -Dgpu_arch=80"

need_packages() {
  missing=""
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing="$missing $package"
  done
  [ -z "$missing" ] && return 0
  if [ "$(id -u)" = 0 ]; then
    run=""
  elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    run="sudo"
  elif command -v sudo >/dev/null 2>&1 && [ -t 0 ]; then
    run="sudo"
  else
    echo "These packages are missing, and installing them needs root or sudo:"
    echo "   $missing"
    echo "Install them with: apt-get install$missing"
    exit 1
  fi
  say "Installing$missing"
  $run apt-get update -qq
  # shellcheck disable=SC2086
  $run env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}
