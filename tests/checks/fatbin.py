#!/usr/bin/env python3
"""A CUDA module holds machine code for each architecture that it was configured for, and PTX of the last, in every kernel file.

usage: fatbin.py MODULE ARCHITECTURE...
"""

import pathlib
import struct
import sys

MAGIC, PTX, MACHINE_CODE = 0xBA55ED50, 1, 2


def section(elf, wanted):
    """The bytes of a section of a 64-bit ELF file."""
    start, = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        at = headers[names][4] + name
        if elf[at:elf.index(b"\0", at)] == wanted:
            return elf[offset:offset + length]
    sys.exit(f"there is no section {wanted.decode()}")


def fat_binaries(data):
    """What each holds, as (kind, architecture)."""
    at = 0
    while (at := data.find(struct.pack("<I", MAGIC), at)) >= 0:
        _, head, size = struct.unpack_from("<HHQ", data, at + 4)
        at, end, held = at + head, at + head + size, set()
        while at < end:
            kind, _, head, size = struct.unpack_from("<HHIQ", data, at)
            held.add((kind, *struct.unpack_from("<I", data, at + 28)))
            at += head + size
        yield held


architectures = [int(a) for a in sys.argv[2:]]
expected = {(MACHINE_CODE, a) for a in architectures} | {(PTX, architectures[-1])}
found = list(fat_binaries(section(pathlib.Path(sys.argv[1]).read_bytes(), b".nv_fatbin")))
assert found, "no kernels"
for held in found:
    assert held == expected, f"there is {sorted(held)}, and {sorted(expected)} was configured"
print(f"{len(found)} kernel files for {architectures}, and PTX: passed")
