#!/usr/bin/env python3
"""Compiles and runs the programs in README.md and docs/*.md, runs the commands in docs/*.md, and checks the links between Markdown files.

A ```cpp block with `int main` is a program. A ```diff block is a change to the last program before it, and its result
is a program too; a line that begins with @@ parts its pieces. Each line of a ```sh block in docs/ is a command; those
that train do so on the first rows of the data, so that this takes seconds.

usage: readme.py SOURCE_ROOT BUILD_ROOT CXX
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))
from fashion_mnist import first_rows

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror"]
AT_ONCE = 3  # some of them wait more than they compute
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Failure(Exception):
    pass


def apply(program, diff):
    """The program with every piece of the diff, whose old lines must be there exactly once."""
    for piece in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = piece.splitlines()
        old = "".join(line[1:] + "\n" for line in lines if line[:1] != "+")
        new = "".join(line[1:] + "\n" for line in lines if line[:1] != "-")
        if program.count(old) != 1:
            raise Failure(f"these lines of a diff are {program.count(old)} times in the program before it:\n{old}")
        program = program.replace(old, new)
    return program


def programs(text):
    """The line number and text of each program in a Markdown file."""
    program = None
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        if language == "cpp" and "int main" in body:
            program = body
        elif language == "diff":
            if program is None:
                raise Failure("a diff has no program before it")
            body = apply(program, body)
        else:
            continue
        yield text.count("\n", 0, block.start()) + 2, body


def commands(text):
    """The line number and text of each command; a backslash joins a line with the next."""
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        if language != "sh":
            continue
        first = text.count("\n", 0, block.start()) + 2
        for match in re.finditer(r"(?:.*\\\n)*.+", body):
            yield first + body.count("\n", 0, match.start()), match.group().replace("\\\n", " ")


def run_command(command, build, data):
    """Runs it in a folder of its own, where build/ is the build folder."""
    command = command.replace("build/examples/fashion_mnist ", f"build/examples/fashion_mnist --data {data} ")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    # What mpirun wants to be told where there is but root, and fewer cores than ranks.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    if command.startswith("mpirun ") and shutil.which("mpirun") is None:
        return "mpirun is not installed: not run\n"
    double = build / "tests/cuda/libtandem_cuda.so"
    if str(double.relative_to(build)) in command and not double.exists():
        return "the double of CUDA is not built: not run\n"
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "build").symlink_to(build)
        return run(["sh", "-c", command], folder, environment)


def build_flags(build):
    libraries = sorted(build.glob("libtandem.so*"))
    if not libraries:
        raise Failure(f"{build} has no libtandem.so; build the library first")
    options = json.loads((build / "meson-info" / "intro-buildoptions.json").read_text())
    sanitizers = next((o["value"] for o in options if o["name"] == "b_sanitize"), "none")
    flags = [f"-I{build}/include", str(libraries[0]), "-lfmt", f"-Wl,-rpath,{build}"]
    return flags if sanitizers == "none" else [*flags, f"-fsanitize={sanitizers}"]


def run(command, folder, environment=None):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode != 0:
        raise Failure(f"{shlex.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def precompiled(folder, compiler, flags):
    """The flags with a folder in front in which the library's header is compiled already: most of a program's time."""
    (folder / "tandem").mkdir()
    header = next(f.removeprefix("-I") for f in flags if f.startswith("-I")) + "/tandem/tandem.h"
    (folder / "tandem" / "tandem.h").write_text(f'#include "{header}"\n')
    options = [f for f in flags if f.startswith(("-I", "-fsanitize"))]
    run([*compiler, *WARNINGS, "-x", "c++-header", "tandem/tandem.h", "-o", "tandem/tandem.h.gch", *options], folder)
    return [f"-I{folder}", *flags]


def compile_and_run(program, compiler, flags):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"TANDEM_CPU_DEVICES": "2"}
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "program.cpp").write_text(program)
        run([*compiler, *WARNINGS, "program.cpp", "-o", "program", *flags], folder)
        return run(["./program"], folder, environment)


def broken_links(path, text):
    for target in LINK.findall(BLOCK.sub("", text)):
        if re.match(r"\w+:", target) or target.startswith("#"):
            continue
        if not (path.parent / target.split("#")[0]).exists():
            yield target


def markdown_files(root):
    for path in sorted(root.rglob("*.md")):
        folder = path.relative_to(root).parts[0]
        if not folder.startswith((".", "build", "subprojects")):
            yield path


def checks(source, build, data, compiler, flags):
    """For each program and command: its place, and a function that runs it and gives what it prints."""
    for path in markdown_files(source):
        name, text = path.relative_to(source), path.read_text()
        if name.parts not in (("README.md",), ("docs", path.name)):
            continue
        for line, program in programs(text):
            yield f"{name}:{line}", functools.partial(compile_and_run, program, compiler, flags)
        for line, command in commands(text) if name.parts[0] == "docs" else ():
            yield f"{name}:{line}: {command}", functools.partial(run_command, command, build, data)


def timed(check):
    start = time.monotonic()
    return check(), time.monotonic() - start


def main():
    source, build = (pathlib.Path(a).resolve() for a in sys.argv[1:3])
    compiler, flags = shlex.split(sys.argv[3]), build_flags(build)
    failed = 0
    for path in markdown_files(source):
        for target in broken_links(path, path.read_text()):
            print(f"{path.relative_to(source)}: the link to {target} leads nowhere")
            failed += 1
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        folder = pathlib.Path(folder)
        flags, data = precompiled(folder, compiler, flags), first_rows(folder, 18000, 2000)
        running = [(place, pool.submit(timed, check)) for place, check in checks(source, build, data, compiler, flags)]
        for place, result in running:
            print(place, flush=True)
            try:
                output, seconds = result.result()
                print(f"{output}({seconds:.1f} s)", flush=True)
            except Failure as e:
                print(e)
                failed += 1
    print(f"{len(running)} programs and commands ran, {failed} faults")
    sys.exit(failed > 0 or not running)


main()
