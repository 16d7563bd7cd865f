# Checks to run before a commit. `make check` is quick, `make slow` takes minutes, `make nightly` takes hours.
PYTHON ?= python

.PHONY: check format lint types imports fast test slow paths native fuzz rules chaos nightly

check: lint types imports fast

format:
	ruff format quire tests
	ruff check --fix quire tests

lint:
	ruff format --check quire tests
	ruff check quire tests

types:
	mypy

imports:
	lint-imports

native:
	$(PYTHON) quire/kernels/native/building.py

fast:
	$(PYTHON) -m pytest tests/pure

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow

paths:
	TEST_KERNELS=torch $(PYTHON) -m pytest tests/cpu/test_engine_*.py tests/cpu/test_grammar_engine.py
	TEST_KERNELS=portable $(PYTHON) -m pytest tests/cpu/test_engine_*.py tests/cpu/test_grammar_engine.py

fuzz:
	$(PYTHON) -m tests.fuzz --cases $(or $(CASES),20000)

rules:
	$(PYTHON) -m tests.rules

chaos:
	$(PYTHON) -m quire chaos --model tiny --deterministic

nightly:
	$(PYTHON) -m tests.nightly --out docs/nightly.md
