# The verbs of this repository; CI calls exactly these.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Test processes side by side; a file's tests share one, and with it the engine that they start.
WORKERS ?= 2
# One place for what the two installations need: the lock, then our own two distributions without their dependencies.
export UV_LINK_MODE ?= hardlink
# Importing SGLang compiles thousands of modules; without their bytecode kept, every server start pays for that again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: reproduce test setup check test-gpu report gate gate-self-test container-steps lock clean

reproduce: setup            ## run the main job for this machine and build its report
	$(BIN)/prefixbench reproduce

test: setup                 ## every test that this machine can run, fast ones first
	$(BIN)/pytest -q -m "not gpu" -n $(WORKERS) --dist loadfile

setup: $(STAMP)             ## create the environment from the lock (first time only)

$(STAMP): requirements.lock pyproject.toml kernels/platform-cpu/pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null   # a .venv made by other tools
	$(BIN)/python -m pip install -q --disable-pip-version-check "uv==0.13.9"
	$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e . -e kernels/platform-cpu
	touch $@

check: setup                ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-gpu: setup             ## GPU tests; fails when there is no GPU
	$(BIN)/pytest -q -m gpu --require-gpu

report: setup               ## rebuild the report of the newest run from runs/ alone
	$(BIN)/prefixbench report latest -o reports/latest

gate: setup                 ## planned work against the accepted counts: no clock, the same verdict on any machine
	$(BIN)/prefixbench workcounts --check

gate-self-test: setup       ## measure the error rates of the gate that compares records
	$(BIN)/prefixbench gate --self-test

container-steps: setup      ## run the steps of the Dockerfile's CPU target in a folder and an environment of their own
	$(BIN)/python tests/container/cpu_steps.py

lock:                       ## renew requirements.lock (hashes, no index addresses)
	uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --no-emit-index-url --extra sglang --extra bench --extra dev pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
