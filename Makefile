# For a fresh Debian 12 machine, as root; each target sets up what it needs (docs/lab.md).
#   make demo    boot two hosts, deploy, break a deploy on purpose, roll back, tear down
#   make test    every test that needs no GPU: lint, types, unit, engine (CPU), lab (real systemd hosts)
#   make check   lint, types and unit tests: a minute, no root
#   make gpu     every proof and measurement that needs a GPU; GPU_PYTHON has torch, triton and SGLang 0.5.17 (docs/engine.md)
SHELL := /bin/bash
.DELETE_ON_ERROR:

VENV ?= .venv
PYTHON := $(VENV)/bin/python
# pytest processes, each with a lab of its own of up to twelve hosts: not more than cores, or hosts boot too slowly
WORKERS ?= $(shell n=$$(nproc); echo $$(( n > 4 ? 4 : n )))
# the interpreter that SGLang is installed for, and where `make gpu` leaves its report
GPU_PYTHON ?= python3
GPU_OUT ?= .gpu
# seconds after which a run of all tests has hung
LIMIT ?= 3600

.PHONY: help demo test check lint gpu clean

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/base: pyproject.toml scripts/setup
	scripts/setup $(VENV) base

$(VENV)/engine: $(VENV)/base $(wildcard tests/engine/requirements.txt)
	scripts/setup $(VENV) engine

demo: $(VENV)/base
	$(PYTHON) scripts/demo.py $(DEMO)

lint: $(VENV)/base
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

check: lint
	$(PYTHON) -m pytest tests/unit

test: $(VENV)/engine lint
	timeout --foreground --kill-after=60 $(LIMIT) \
	  $(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	  -m "not gpu" tests/lab tests/engine tests/unit

gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --out $(GPU_OUT) $(GPU)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
