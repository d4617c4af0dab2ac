#!/usr/bin/env bash
# Runs the tests and the benchmarks of a GPU on a machine that reaches no package index, within ten minutes.
#
#   tests/gpu/offline.sh WHEELS RESULTS [PYTHON]
#
# WHEELS is a folder that `make gpu-wheels` has filled, RESULTS one for the figures and the machine's description, and
# PYTHON (python3) has a torch for CUDA, and pip. This Lightning comes from build/wheels. Nothing is installed into
# PYTHON's own environment, and nothing is left of the one that is made.
set -euo pipefail
wheels=$(realpath "$1") results=$(realpath -m "$2") python=${3:-python3}
cd "$(dirname "$0")/../.."
mkdir -p "$results"
ours=(build/wheels/{lightning,pytorch_lightning}-*.whl)
[[ -e ${ours[0]} && -e ${ours[1]} ]] || { echo "build/wheels has not both wheels of this Lightning: make setup" >&2; exit 1; }

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
# A link to what PYTHON has, for that may be a virtual environment itself, which another one cannot inherit. What is
# installed here comes first.
"$python" -m venv --without-pip "$environment"
own=$environment/bin/python
there=("$wheels"/*.whl)
if "$python" -c 'import numpy' 2> /dev/null; then  # with which others that torchmetrics imports may have been built
  there=($(printf '%s\n' "${there[@]}" | grep -v '/numpy-'))
fi
"$python" -c 'import os, site, torch; print(os.path.dirname(os.path.dirname(torch.__file__)), *site.getsitepackages(), sep="\n")' \
  > "$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-python.pth"
"$python" -m pip --python "$own" install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
  --ignore-installed "${there[@]}" "${ours[@]}"

export PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1  # PYTHON may have plugins for another pytest
"$own" benchmarks/gpu/machine.py | tee "$results/machine.json"
failed=0
# SIGINT has pytest tell what it has done so far
timeout --signal=INT --kill-after=20 340 "$own" -m pytest -m gpu tests/gpu -v --durations=15 --timeout=150 \
  -p no:cacheprovider -p pytest_timeout 2>&1 | tee "$results/tests.txt" || failed=1
timeout --kill-after=10 180 "$own" benchmarks/gpu/run.py "$results/bench.json" 2>&1 | tee "$results/bench.txt" || failed=1
exit $failed
