"""Runs Lightning's own tests of the files that the patches touch, without the patches and with them.

``python -m tools.upstream_tests CHECKOUT`` takes a git clone of Lightning, which stays as it is: the tests run in two
clones of it below ``build/``, one with the patches as they are exported. It prints the tests whose outcomes differ, and
fails if there are others than those of ``tests/patches/upstream_differences.toml``, or if a test fails that an exported
patch brings along. Everything that Lightning's tests need is installed by ``make test-upstream``.
"""

import argparse
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from patches.export import export
from patches.format import REPOSITORY, Patch, PatchError, load_patches
from patches.layout import Layout
from patches.status import judge

WORK = REPOSITORY / "build" / "upstream-tests"
KNOWN = REPOSITORY / "tests" / "patches" / "upstream_differences.toml"
#: Folders of Lightning's tests of what the patches change in files that have no tests of their own name.
_FOLDERS = ("tests_pytorch/checkpointing", "tests_pytorch/loggers", "tests_pytorch/profilers", "tests_pytorch/tuner")
#: Seconds for one test, and for all of a clone.
_PATIENCE, _PATIENCE_FOR_ALL = 120, 3600


def main() -> int:
    """Prints the differences, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.upstream_tests", description=__doc__)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="the top folder of a git clone of Lightning")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="files below its folder tests [default: see above]")
    arguments = parser.parse_args()
    try:
        return _compare(arguments.checkout.resolve(), arguments.tests)
    except (PatchError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _compare(checkout: Path, tests: list[str]) -> int:
    shutil.rmtree(WORK / "trees", ignore_errors=True)
    before, after = (_clone(checkout, WORK / "trees" / name) for name in ("stock", "patched"))
    patches = [patch for patch in load_patches() if judge(Layout(before), patch).state != "landed"]
    export(after, patches, "io-patches")
    names = tests or sorted(_tests_of(patches, before / "tests"))
    print(f"{len(names)} files and folders of tests, without the patches and with them", flush=True)
    outcomes = [_run(tree, tree / "tests", names) for tree in (before, after)]
    brought = sorted({name for patch in patches for name in patch.adds if Path(name).name.startswith("test_")})
    own = _run(after, after, brought)
    print(f"tests that the patches bring along: {_summary(own)}")
    print(f"Lightning's tests without the patches: {_summary(outcomes[0])}\nand with them: {_summary(outcomes[1])}")
    known = {one["test"]: one["reason"] for one in tomllib.loads(KNOWN.read_text(encoding="utf-8"))["difference"]}
    code = 0 if own and set(own.values()) <= {"passed", "skipped"} else 1
    for test in sorted(outcomes[0].keys() | outcomes[1].keys()):
        was, now = (outcome.get(test, "not there") for outcome in outcomes)
        if was != now:
            print(f"{test}: {was}, with the patches {now} ({known.get(test, 'NOT KNOWN')})")
            code |= test not in known
    return int(code)


def _clone(checkout: Path, tree: Path) -> Path:
    tree.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", "--shared", str(checkout), str(tree)], check=True)
    for setting in ("user.name=nobody", "user.email=nobody@localhost"):  # the commits stay here
        subprocess.run(["git", "-C", str(tree), "config", *setting.split("=")], check=True)
    return tree


def _tests_of(patches: Iterable[Patch], tests: Path) -> set[str]:
    """Names the files of tests that are called after a patched file, and the folders of others."""
    found = set(_FOLDERS)
    for file in (PurePosixPath(edit.spec["file"]) for patch in patches for edit in patch.edits):
        for path in (tests / f"tests_{file.parts[1]}").rglob(f"test_{file.stem}.py"):
            name = path.relative_to(tests).as_posix()
            if not name.startswith(_FOLDERS):
                found.add(name)
    return found


def _run(tree: Path, folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the outcomes of all tests in some files below a folder, by their names."""
    report = WORK / f"{tree.name}-{folder.name}.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "-rN", f"--timeout={_PATIENCE}", f"--junitxml={report}"]
    options += ["--ignore-glob=*/test_legacy_checkpoints.py"]  # it needs files that are not in the repository
    command = [str(WORK / "venv/bin/python"), "-m", "pytest", *options, "-n2", "--dist=loadfile", *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(folder)])}
    log = report.with_suffix(".log")
    with log.open("w") as output:
        subprocess.run(
            command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=_PATIENCE_FOR_ALL, check=False
        )
    if not report.is_file():
        raise PatchError(f"the tests in {folder} did not run: see {log}")
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
        )
        for case in ElementTree.parse(report).iter("testcase")
    }


def _summary(outcomes: dict[str, str]) -> str:
    kinds = sorted(set(outcomes.values()))
    return ", ".join(f"{list(outcomes.values()).count(kind)} {kind}" for kind in kinds) or "none"


if __name__ == "__main__":
    sys.exit(main())
