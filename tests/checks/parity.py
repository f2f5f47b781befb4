#!/usr/bin/env python3
"""Checks docs/parity.md: each row names a test that exists, or says why there is none.

usage: parity.py SOURCE_ROOT
"""

import pathlib
import re
import sys

ROWS = 44
LEAST = 8  # letters of a case


def faults(root):
    rows = []
    for line in (root / "docs" / "parity.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0].isdigit():
            rows.append(cells)
    if [int(row[0]) for row in rows] != list(range(1, ROWS + 1)):
        yield f"the rows are not numbered 1 to {ROWS}"
    for row in rows:
        shown = row[4].rstrip("| ") if len(row) > 4 else ""
        tests = re.findall(r'([\w./]+): "([^"]+)"', shown)
        if not tests and not re.search(r"\*\*(not yet|no)\*\*", row[3], re.IGNORECASE):
            yield f"row {row[0]} names no test, and does not say why"
        for name, case in tests:
            file = root / name
            if not file.is_file():
                yield f"row {row[0]}: there is no {name}"
            elif len(case) < LEAST:
                yield f'row {row[0]}: "{case}" is too short to be a case\'s alone; give its name, or words of it'
            elif case not in file.read_text():
                yield f'row {row[0]}: {name} has no "{case}"'


found = list(faults(pathlib.Path(sys.argv[1])))
for fault in found:
    print(fault)
sys.exit(1 if found else 0)
