#!/usr/bin/env python3
"""Runs a program by mpirun; ends as it does.

usage: mpirun_test.py RANKS PROGRAM ARGUMENT...
"""

import sys

import mpirun

mpirun.need_mpirun()
code, out, err = mpirun.run(sys.argv[1], sys.argv[2:], 280)
print(out, err, sep="")
sys.exit(code)
