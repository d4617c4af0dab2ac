# `make demo` and `make test` each work as the first command in a fresh clone; they need python3 (3.10 or newer, with
# venv), make and git. Everything is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WHEELS := build/wheels
BENCH := build/bench
AZURITE := build/azurite
AZURITE_VERSION := 3.35.0
STORES := build/stores
S3RVER_VERSION := 3.7.1

# A stamp's name holds a checksum of what the step depends on: a second run takes no time, whatever a checkout did to
# the files' times, and an interrupted step, which leaves no stamp, is done again.
checksum = $(firstword $(shell find $(1) -type f ! -name '*.pyc' | LC_ALL=C sort | xargs cksum | cksum))
TOOLS_STAMP := $(VENV)/tools-$(call checksum,requirements)
FORK_STAMP := $(VENV)/fork-$(call checksum,requirements src patches build_backend pytorch-lightning setup.py NOTICE)
STOCK_STAMPS := $(foreach pins,upstream stock-2.6.4,$(BENCH)/$(pins)/stock-$(call checksum,requirements))
STORES_STAMP := $(STORES)/installed-$(S3RVER_VERSION)-$(call checksum,requirements/stores.txt)
UPSTREAM_TESTS := build/upstream-tests
UPSTREAM_TESTS_STAMP := $(UPSTREAM_TESTS)/venv/installed-$(call checksum,requirements/upstream-tests.txt)
PLOT_STAMP := $(BENCH)/plot/plot-$(call checksum,requirements/plot.txt)

# Lightning is a package that is installed, and so are our modules inside it: mypy finds them by name.
OUR_MODULES = $(shell cd src && find lightning -name '*.py' | sed -e 's|/__init__\.py$$||' -e 's|\.py$$||' -e 's|/|.|g' | LC_ALL=C sort)

.PHONY: setup test test-all setup-azure test-azure setup-hdfs test-hdfs setup-stores test-stores setup-device test-device test-upstream test-gpu gpu-wheels test-versions lint demo bench bench-files bench-sharded bench-async bench-scale bench-gpu dev clean
.DELETE_ON_ERROR:

setup: $(FORK_STAMP)

# In three processes on two cores, for much of what they do is to wait; who is done takes tests from those who are not.
# Stores that `make test-azure` and its like install are left to these also where they are installed.
test: lint
	$(BIN)/python -m pytest -m "not slow and not packaging and not azure and not hdfs and not stores and not late_device" \
	  --numprocesses 3 --dist worksteal

# And what takes long: builds and installations, whole matrices, thousands of damaged checkpoints.
test-all: test
	$(BIN)/python -m pytest -m "slow or packaging" --numprocesses 3 --dist worksteal

# What `make test` leaves out, for it needs npm. A version of azurite is installed once, into a folder of its own.
test-azure: setup-azure
	$(BIN)/python -m pytest -m azure

setup-azure: setup $(AZURITE)/installed-$(AZURITE_VERSION)

$(AZURITE)/installed-$(AZURITE_VERSION):
	@command -v npm || { echo "npm is missing, which installs azurite: install Node.js" >&2; exit 1; }
	rm -rf $(AZURITE)
	npm install --prefix $(AZURITE) --no-audit --no-fund --no-package-lock azurite@$(AZURITE_VERSION)
	touch $@

# What `make test` leaves out, for it needs Debian's packages, a JDK and gcc, and fetches 220 MB.
test-hdfs: setup-hdfs
	$(BIN)/python -m pytest -m hdfs

setup-hdfs: setup build/hdfs/installed

build/hdfs/installed: tests/servers/hdfs.py | setup
	$(BIN)/python -m tests.servers.hdfs

# What `make test` leaves out, for it needs npm, and fetches 100 MB. nginx is tested where it is installed.
test-stores: setup-stores
	$(BIN)/python -m pytest -m stores

setup-stores: setup $(STORES_STAMP)

$(STORES_STAMP):
	@command -v npm || { echo "npm is missing, which installs s3rver: install Node.js" >&2; exit 1; }
	rm -rf $(STORES)
	$(PYTHON) -m venv $(STORES)/venv
	$(STORES)/venv/bin/python -m pip install --quiet --requirement requirements/stores.txt
	npm install --prefix $(STORES) --no-audit --no-fund --no-package-lock s3rver@$(S3RVER_VERSION)
	touch $@

# What `make test` leaves out, for it needs a C++ compiler, and a process of its own.
test-device: setup-device
	$(BIN)/python -m pytest -m late_device tests/late_device

setup-device: setup
	$(BIN)/python -m tests.late_device.build

# Those of them that `make test` skips where there is no CUDA device: here that is an error. See tests/gpu/offline.sh for
# a machine that reaches no package index.
test-gpu: setup
	$(BIN)/python benchmarks/gpu/machine.py
	$(BIN)/python -m pytest -m gpu tests/gpu

# All that tests/gpu/offline.sh installs, for a Python of GPU_PYTHON whose torch is there already.
GPU_PYTHON ?= $(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
gpu-wheels: setup
	$(BIN)/python tests/gpu/wheels.py build/gpu-wheels --python $(GPU_PYTHON)

# Lightning's own tests, without the patches and with them: make test-upstream CHECKOUT=../pytorch-lightning
test-upstream: setup $(UPSTREAM_TESTS_STAMP)
	@test -n "$(CHECKOUT)" || { echo "name a git clone of Lightning: make test-upstream CHECKOUT=DIR" >&2; exit 1; }
	$(BIN)/python -m tools.upstream_tests $(CHECKOUT)

# It sees what .venv has, and has more of its own.
$(UPSTREAM_TESTS_STAMP):
	rm -rf $(UPSTREAM_TESTS)/venv
	$(BIN)/python -m venv $(UPSTREAM_TESTS)/venv
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(UPSTREAM_TESTS)/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_tools.pth"
	$(UPSTREAM_TESTS)/venv/bin/python -m pip install --quiet --requirement requirements/upstream-tests.txt
	touch $@

# The wheels beside other versions of torch, Python and the clients: for some of its rows, make test-versions ROWS="NAME NAME"
ROWS ?=
test-versions: setup
	$(BIN)/python -m tools.versions $(ROWS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p build_backend -p patches -p tools -m setup $(addprefix -m ,$(OUR_MODULES))

demo: setup
	$(BIN)/python demo/run.py

# Ours in .venv, beside stock releases in environments of their own; takes about 45 minutes, and less where RUNS says how
# often a figure is measured at most. One part after the other, whatever `make -j` says.
RUNS ?= 5
bench: setup $(STOCK_STAMPS) $(PLOT_STAMP)
	$(MAKE) bench-files
	$(MAKE) bench-sharded
	$(MAKE) bench-async

bench-files: RELEASES := stock-2.6.4 upstream
bench-files: PICTURE := docs/benchmarks.svg
bench-sharded: RELEASES := upstream
bench-sharded: PICTURE := docs/benchmarks-sharded.svg
bench-async: RELEASES := upstream
bench-async: PICTURE := docs/benchmarks-async.svg
bench-files bench-sharded bench-async: bench-%: setup $(STOCK_STAMPS) $(PLOT_STAMP)
	$(BIN)/python benchmarks/run.py --only $* --runs $(RUNS) --results $(BENCH)/$*.json \
	  $(RELEASES:%=--beside $(BENCH)/%/bin/python)
	$(BIN)/python benchmarks/report.py $(BENCH)/$*.json docs/benchmarks.md
	$(BENCH)/plot/bin/python benchmarks/plot.py $(BENCH)/$*.json $(PICTURE)

# What saves of large jobs would take; about half an hour, most of it for the plans of 1,024 ranks.
bench-scale: setup $(BENCH)/upstream/stock-$(call checksum,requirements) $(PLOT_STAMP)
	$(BIN)/python benchmarks/scale/planning.py benchmarks/scale/measured/planning.json
	$(BIN)/python benchmarks/scale/validate.py benchmarks/scale/measured/validation.json \
	  --beside $(BENCH)/upstream/bin/python
	$(BIN)/python benchmarks/scale/scenarios.py $(BENCH)/scale.json --page docs/scale.md
	$(BENCH)/plot/bin/python benchmarks/plot.py $(BENCH)/scale.json docs/scale.svg

# What only a CUDA device shows of saves in the background; some minutes.
bench-gpu: setup
	$(BIN)/python benchmarks/gpu/run.py $(BENCH)/gpu.json

# Both distributions in .venv from linked sources, until a change of the sources makes `make setup` install wheels again.
dev: setup
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable . --editable ./pytorch-lightning

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo \
	  "$(PYTHON) is missing or older than Python 3.10: install a newer one, or name it: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo \
	  "$(PYTHON) cannot make virtual environments: install its venv module (on Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(TOOLS_STAMP): $(VENV)/created
	$(BIN)/python -m pip install --quiet --requirement requirements/test.txt
	rm -f $(VENV)/tools-*
	touch $@

# Both wheels in one command, for lightning requires pytorch-lightning: pip would take stock from the index otherwise.
# Uninstalled first, for pip keeps an installed wheel of the same version.
$(FORK_STAMP): $(TOOLS_STAMP)
	rm -rf $(WHEELS) $(VENV)/fork-*
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(WHEELS) . ./pytorch-lightning
	$(BIN)/python -m pip uninstall --quiet --yes lightning pytorch-lightning
	$(BIN)/python -m pip install --quiet $(WHEELS)/*.whl
	touch $@

# A stock release, named by the file of its pins. Its own wheels by hash; all else in the version that .venv has.
$(STOCK_STAMPS): $(BENCH)/%/stock-$(call checksum,requirements): $(TOOLS_STAMP) | $(FORK_STAMP)
	$(PYTHON) -m venv --clear $(BENCH)/$*
	$(BIN)/python -m pip freeze --exclude lightning --exclude pytorch-lightning > $(BENCH)/$*/versions.txt
	$(BENCH)/$*/bin/python -m pip install --quiet --no-deps --require-hashes --requirement requirements/$*.txt
	$(BENCH)/$*/bin/python -m pip install --quiet --constraint $(BENCH)/$*/versions.txt \
	  --requirement requirements/bench.txt lightning pytorch-lightning
	touch $@

$(PLOT_STAMP):
	$(PYTHON) -m venv --clear $(BENCH)/plot
	$(BENCH)/plot/bin/python -m pip install --quiet --requirement requirements/plot.txt
	touch $@
