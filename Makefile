# Two commands need nothing but Python 3.11, pip and make:
#
#   make train    trains the first recipe on two processes of this machine
#   make test     runs the linters, the type checker and the tests
#
# Everything is installed into .venv, at the versions of constraints.txt.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
MARK ?= -m "not slow"
CODE := topology runtime collectives tpu_dist launch recipes tests benchmarks

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint unit scale multi conformance benchmark stubs clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -8

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,recipes]"
	@touch $@

train: $(INSTALLED)
	$(BIN)/tpu-launch --nproc-per-node 2 -m tpu_dist.recipes.kjv $(ARGS)

test: lint unit scale multi

# The tests that take minutes, too.
test-all:
	$(MAKE) test MARK=

lint: $(INSTALLED)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy -p tpu_dist

unit: $(INSTALLED)
	$(BIN)/python -m pytest -q $(MARK) -n 2 --dist loadfile tests/unit $(ARGS)

scale: $(INSTALLED)
	$(BIN)/python -m pytest -q $(MARK) tests/scale $(ARGS)

multi: $(INSTALLED)
	$(BIN)/python -m pytest -q $(MARK) tests/multi $(ARGS)

# Full tables, minutes to an hour: see docs/conformance.md and docs/benchmarks.md.
conformance: $(INSTALLED)
	$(BIN)/python tests/conformance/run.py --full $(ARGS)

benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/collectives.py $(ARGS)

# The Python of launch/service/rendezvous.proto, by the lowest grpcio-tools that is supported: what it
# generates runs with it and all later ones.
STUBS := build/stubs
stubs:
	$(PYTHON) -m venv --clear $(STUBS)
	$(STUBS)/bin/pip install --quiet --disable-pip-version-check "grpcio-tools==1.76.0"
	$(STUBS)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		tpu_dist/launch/service/rendezvous.proto

clean:
	rm -rf $(VENV) build *.egg-info
