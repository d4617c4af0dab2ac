"""`lightning` and `pytorch-lightning` are installed separately: a half that stayed stock must not go unnoticed."""

from pathlib import Path

import pytest

from tests.packaging.tools import RELEASE, Environment, Run

COMMAND = "`pip install . ./pytorch-lightning`"
IMPORTS = {"lightning": "lightning", "pytorch": "pytorch_lightning"}
DISTRIBUTIONS = {"lightning": "lightning", "pytorch": "pytorch-lightning"}
INSTALL = ["install", "--no-index", "--no-deps", "--ignore-installed", "--no-compile", "--disable-pip-version-check"]


@pytest.fixture
def environment(run: Run, tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv", run, see_running=True)


def warnings_of(environment: Environment, code: str) -> list[str]:
    result = environment.run(environment.python, "-c", code, cwd=environment.folder)
    return [line for line in result.stderr.splitlines() if "pip install" in line]


@pytest.mark.parametrize(("ours", "stock"), [("lightning", "pytorch"), ("pytorch", "lightning")])
def test_importing_ours_beside_a_stock_twin_warns_once_with_the_command_that_installs_both(
    ours: str, stock: str, environment: Environment, wheels: dict[str, Path], pristine: dict[str, Path]
) -> None:
    environment.pip(*INSTALL, wheels[ours], pristine[stock])
    (told,) = warnings_of(environment, f"import {IMPORTS[ours]}, lightning, pytorch_lightning, lightning.pytorch")
    assert COMMAND in told
    assert f"`{DISTRIBUTIONS[stock]}` is stock {RELEASE}" in told
    assert warnings_of(environment, f"import {IMPORTS[stock]}") == []  # stock, which knows nothing of it


def test_the_command_in_the_warning_is_the_one_that_the_readme_gives() -> None:
    readme = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    for part in COMMAND.strip("`").split(" && "):
        assert part in readme


def test_two_of_ours_are_silent_and_load_no_client_library(environment: Environment, wheels: dict[str, Path]) -> None:
    environment.pip(*INSTALL, *wheels.values())
    clients = {"obstore", "s3fs", "gcsfs", "adlfs", "boto3", "botocore", "azure", "google"}
    loaded = "{name.partition('.')[0] for name in sys.modules}"
    code = f"import lightning, pytorch_lightning, sys; print({clients!r} & {loaded})"
    assert warnings_of(environment, code) == []
    assert environment.run(environment.python, "-c", code, cwd=environment.folder).stdout.strip() == "set()"
