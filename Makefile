# Two commands:
#   make demo    serve SmolLM2-135M-Instruct with JetSpec++ and with plain vLLM, show both, compare
#   make test    lint, types, and every test
# Both make their own .venv and prepare the demo model on first use. PYTHON=... chooses the interpreter.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help demo test

VENV := .venv
PYTHON ?= python3
export JETSPECPP_DEMO_TARGET := $(abspath $(or $(JETSPECPP_DEMO_TARGET),.cache/smollm2-135m-instruct))
TARGET_READY := $(JETSPECPP_DEMO_TARGET)/prepared.json

help:
	@sed -n '/^# Two/,/^# Both/s/^# \{0,1\}//p' Makefile

demo: $(TARGET_READY)
	$(VENV)/bin/jetspecpp demo

test: $(TARGET_READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -q --durations=15

$(TARGET_READY): $(VENV)/installed.json
	$(VENV)/bin/jetspecpp prepare-demo --out $(JETSPECPP_DEMO_TARGET)
	@touch $@

# A command that exists need not run (a shim may know the version and not have it), and Debian ships venv apart.
$(VENV)/installed.json: setup.py pyproject.toml scripts/install.py
	@for python in $(PYTHON) python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; \
	  then exec $$python scripts/install.py $(VENV); fi; \
	done; \
	echo "No Python 3.11 to 3.14 with the venv module was found: install one, or name it with PYTHON=/path/to/python3." >&2; exit 1
