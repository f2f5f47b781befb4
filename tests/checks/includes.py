#!/usr/bin/env python3
"""Fails on an include that points against the arrow of the folders, or on a library outside its one place.

usage: includes.py SOURCE_ROOT
"""

import pathlib
import re
import sys

# What each folder may include, besides itself.
ALLOWED = {
    "tensor": set(),
    "autograd": {"tensor"},
    "nn": {"tensor", "autograd"},
    "optim": {"tensor", "autograd"},
    "data": {"tensor"},
    "parallel": {"tensor", "autograd", "nn", "optim"},
}
# Libraries and the only folder that may include them.
PLACES = [
    (re.compile(r"^(Eigen/|dnnl)"), ("tensor/cpu/",)),
    (re.compile(r"^(cuda|cublas|cudnn|nccl)"), ("tensor/cuda/", "parallel/comm/nccl")),
    (re.compile(r"^nlohmann/"), ("tensor/io/",)),
    (re.compile(r"^(zlib\.h)"), ("data/",)),
    (re.compile(r"^asio"), ("parallel/comm/store_server.cpp", "parallel/comm/tcp_store.cpp")),
    (re.compile(r"^gloo/"), ("parallel/comm/gloo_",)),
    (re.compile(r"^mpi\.h"), ("parallel/comm/mpi_",)),
    (re.compile(r"^openssl/"), ("parallel/comm/secret.cpp",)),
]
# Slow to compile: kept out of public headers.
SLOW = re.compile(r"^(functional|thread|chrono|iostream|regex|future|Eigen/.*|dnnl.*|nlohmann/.*|asio.*|gloo/.*)$")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def faults(root):
    names = re.search(r"public_names = '([^']+)'", (root / "meson.build").read_text()).group(1).split("|")
    for folder, allowed in ALLOWED.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
                continue
            name = path.relative_to(root).as_posix()
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                target = match.group(1)
                where = f"{name}:{number}: <{target}>"
                if target.startswith("tandem/"):
                    parts = target.split("/")
                    if len(parts) < 3 or (parts[1] != folder and parts[1] not in allowed):
                        yield f"{where} points against the arrow: {folder} may include {sorted(allowed)} and itself"
                elif '"' in line:
                    yield f"{where}: our headers are spelled <tandem/...>"
                for library, places in PLACES:
                    if library.match(target) and not name.startswith(places):
                        yield f"{where} belongs to {' and '.join(places)} alone"
                internal = name.startswith(("parallel/comm/", "parallel/launch/")) and path.stem not in names
                if path.suffix == ".h" and not internal and SLOW.match(target):
                    yield f"{where} is too slow to compile for a public header"


def main():
    found = list(faults(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "every include follows the arrow")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
