"""The rooms of ``lightning.fabric.storage``, and which imports which: ``python -m tools.imports``.

A room is a package or a module right below it. Each may import only from those that stand below it here.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "lightning.fabric.storage"
#: From the top.
ROOMS = (
    "tools",
    "strategies",
    "background",
    "sharded",
    "archives",
    "collectives",
    "transport",
    "save_report",
    "options",
    "paths",
    "own_plugins",
    "device_copies",
    "gc_pause",
)
SOURCES = Path(__file__).parent.parent / "src"


def modules() -> dict[str, Path]:
    """Returns the files of the package by the names of their modules."""
    folder = SOURCES / PACKAGE.replace(".", "/")
    names = {path: ".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in sorted(folder.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports() -> Iterator[tuple[str, str]]:
    """Yields each import of one module of the package by another, as their names."""
    known = modules()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [one if one in known else node.module for one in inner]
            else:
                continue
            yield from ((name, one) for one in sorted(set(found)) if one in known and one != name)


def room_of(module: str) -> str:
    """Returns the room that a module of the package is in."""
    return module.removeprefix(f"{PACKAGE}.").partition(".")[0]


def faults() -> list[str]:
    """Returns what breaks the rule: modules in no room, imports upwards, and circles of modules."""
    found = [f"{name} is in no room" for name in modules() if name != PACKAGE and room_of(name) not in ROOMS]
    if found:
        return found
    arrows = list(imports())
    for one, other in arrows:
        if one != PACKAGE and ROOMS.index(room_of(one)) > ROOMS.index(room_of(other)):
            found.append(f"{one} imports {other}, which is above it")
    below: dict[str, set[str]] = {name: set() for name in modules()}
    for one, other in arrows:
        below[one].add(other)
    while free := [name for name, others in below.items() if not others]:
        for name in free:
            del below[name]
        for others in below.values():
            others.difference_update(free)
    return found + [f"{name} is in a circle, or above one" for name in below]


def floors(arrows: set[tuple[str, str]], rooms: set[str]) -> int:
    """Returns the number of floors, where each room stands above all that it imports."""
    floor = dict.fromkeys(rooms, 1)
    for _ in rooms:
        for one, other in arrows:
            floor[one] = max(floor[one], floor[other] + 1)
    return max(floor.values())


def main() -> None:
    """Prints the rooms with their lines and what each imports, and the faults."""
    known = {name: path for name, path in modules().items() if name != PACKAGE}
    between = {(room_of(one), room_of(other)) for one, other in imports() if PACKAGE not in (one, other)}
    between = {(one, other) for one, other in between if one != other}
    rooms = {room_of(name) for name in known}
    for room in sorted(rooms, key=lambda room: ROOMS.index(room) if room in ROOMS else -1):
        paths = [path for name, path in known.items() if room_of(name) == room]
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in paths)
        below = ", ".join(sorted(other for one, other in between if one == room)) or "nothing"
        print(f"{room:12} {len(paths):3} modules {lines:6} lines, imports {below}")
    print(f"{len(rooms)} rooms on {floors(between, rooms)} floors, {len(between)} arrows")
    print("\n".join(faults()) or "Each imports only from those below it.")


if __name__ == "__main__":
    main()
