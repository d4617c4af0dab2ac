"""``python -m patches``: apply the patches to a tree, export them as commits, or tell what has become of them."""

import argparse
import ast
import sys
import tempfile
import zipfile
from pathlib import Path

from build_backend import upstream
from build_backend.distribution import LIGHTNING, PYTORCH_LIGHTNING
from patches.engine import apply_patches
from patches.export import export
from patches.format import Patch, PatchError, load_patches, select
from patches.layout import Layout
from patches.status import judge
from patches.syntax import statements


def main() -> int:
    """Runs one verb and returns the exit status."""
    arguments = _parser().parse_args()
    try:
        known = load_patches()
        patches = select(known, arguments.patches) if arguments.patches else known
        return int(arguments.run(arguments, patches))
    except (PatchError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m patches", description="The patches of this project to Lightning.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    tree = "a checkout of Lightning, or an unpacked wheel of lightning or pytorch-lightning"

    verb = verbs.add_parser("apply", help="make the edits in a tree", description="Make the edits in a tree.")
    verb.set_defaults(run=_apply)
    verb.add_argument("tree", metavar="TREE", type=Path, help=tree)
    _add_patches(verb)

    about = "Make one commit per patch, on a new branch of a clean git checkout of Lightning."
    verb = verbs.add_parser("export", help="make one commit per patch in a git checkout", description=about)
    verb.set_defaults(run=_export)
    verb.add_argument("--branch", metavar="NAME", default="io-patches", help="the branch to create [%(default)s]")
    verb.add_argument("--out", metavar="DIR", type=Path, help="a new folder for the commits as files (for git am)")
    verb.add_argument("checkout", metavar="CHECKOUT", type=Path, help="the top folder of a git clone of Lightning")
    _add_patches(verb)

    about = "Tell for each patch whether it applies, has landed or is broken. Fails unless all apply."
    verb = verbs.add_parser("status", help="tell which patches apply, have landed or are broken", description=about)
    verb.set_defaults(run=_status)
    verb.add_argument("tree", metavar="TREE", type=Path, help=tree)
    _add_patches(verb)

    about = (
        "Fetch a released version from the package index, and tell for each patch whether it applies, has landed or is"
        " broken, of both distributions. Fails unless all apply."
    )
    verb = verbs.add_parser("check", help="tell the same of a released version", description=about)
    verb.set_defaults(run=_check)
    verb.add_argument("version", metavar="VERSION", help="such as 2.6.6")
    pin = "have builds start from it: writes requirements/upstream.txt, whatever has become of the patches"
    verb.add_argument("--pin", action="store_true", help=pin)
    _add_patches(verb)

    about = "Tell how many edits the patches make in how many files, and what of Lightning's they quote."
    verb = verbs.add_parser("count", help="tell how many edits there are", description=about)
    verb.set_defaults(run=_count)
    _add_patches(verb)
    return parser


def _add_patches(verb: argparse.ArgumentParser) -> None:
    text = "a patch, which brings those that it requires [default: all]"
    verb.add_argument("patches", metavar="PATCH", nargs="*", help=text)


def _apply(arguments: argparse.Namespace, patches: list[Patch]) -> int:
    for path, names in sorted(apply_patches(arguments.tree, patches).items()):
        print(f"{path.relative_to(arguments.tree).as_posix()}: {', '.join(names)}")
    return 0


def _export(arguments: argparse.Namespace, patches: list[Patch]) -> int:
    export(arguments.checkout, patches, arguments.branch, arguments.out)
    print(f"{arguments.checkout} is on the new branch {arguments.branch!r}; patches, one commit each: {len(patches)}")
    if arguments.out is not None:
        print(f"{arguments.out} holds them as files for git am")
    return 0


def _check(arguments: argparse.Namespace, patches: list[Patch]) -> int:
    code, pins = 0, []
    for name in (LIGHTNING.name, PYTORCH_LIGHTNING.name):
        with tempfile.TemporaryDirectory() as folder:
            pin = upstream.download_release(name, arguments.version, Path(folder))
            print(f"{name} {pin.version}, sha256 {pin.sha256}")
            with zipfile.ZipFile(Path(folder, pin.file_name)) as wheel:
                wheel.extractall(Path(folder, "tree"))
            code |= _judge(Path(folder, "tree"), patches)
        pins.append(pin)
    if arguments.pin:
        upstream.write_pins(pins)
        print(f'{upstream.PINS} has this version. Next: docs/development.md, "A new release of Lightning"')
    return code


def _status(arguments: argparse.Namespace, patches: list[Patch]) -> int:
    return _judge(arguments.tree, patches)


def _judge(tree: Path, patches: list[Patch]) -> int:
    layout = Layout(tree)
    result = {patch.name: judge(layout, patch) for patch in patches}
    for name, (state, reason) in result.items():
        print(f"{name}: {state}{': ' if reason else ''}{reason}")
    return 0 if all(status.state == "applies" for status in result.values()) else 1


def _count(arguments: argparse.Namespace, patches: list[Patch]) -> int:
    edits = [edit.spec for patch in patches for edit in patch.edits]
    files = {edit["file"] for edit in edits}
    found = [statements(edit["find"]) for edit in edits if "find" in edit]
    expressions = sum(len(run) == 1 and isinstance(run[0], ast.Expr) for run in found)
    nodes = sum(isinstance(node, ast.stmt) for run in found for top in run for node in ast.walk(top))
    print(f"edits: {len(edits)} in {len(files)} files")
    print(f"quoted: {nodes - expressions} statements, {expressions} expressions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
