# make quickstart   set up, then the whole journey from raw text to a model that answers (minutes, 2 CPU cores)
# make test         set up, lint, all tests
# make again        the tests that failed the last time, one after the other
# make lint         ruff and mypy
# make bench        the programs under benchmarks/; what they print lands in benchmarks/results/
# make slow         the tests that are too slow for make test
# make chaos        the acceptance table of docs/resilience.md: faults in real training, and every test that it names
# make soak         random faults for 30 minutes (SOAK_MINUTES, SOAK_EVERY), then 100 kills
# make layouts      every way of spreading a model against one process: the table, and each resumed from each other
# make gpu          the tests that need a CUDA device
# make lock         resolves requirements.lock for x86_64 and aarch64, Python 3.11 to 3.13

BIN := .venv/bin
RUNTIME := .venv/.runtime-ready
DEV := .venv/.dev-ready
SETUP_INPUTS := pyproject.toml requirements.lock package.json package-lock.json $(wildcard scripts/*.sh)

# Without bytecode every process compiles the package, and every worker the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test again lint kernels bench slow chaos soak layouts gpu lock clean

quickstart: $(RUNTIME)
	$(BIN)/z2a quickstart $(ARGS)

# Three workers, on two cores too: many tests wait for other processes.
# A test that hangs fails with the stacks of its threads, long before a job of continuous integration is ended.
test: $(DEV)
	$(MAKE) --no-print-directory -j 2 lint kernels
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu and not slow and not chaos and not soak" -n 3 --dist loadfile --no-loadscope-reorder --durations 10 --timeout 1200; \
	code=$$?; mkdir -p .pytest_cache; echo $$code > .pytest_cache/exit_code; exit $$code

# The tests that failed the last time, one after the other.
again: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest --last-failed --last-failed-no-failures none --timeout 1200

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compiled code of a clean clone, once instead of in every worker of the tests.
kernels: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.compile_kernels

bench: $(RUNTIME)
	$(BIN)/python benchmarks/spine.py
	$(BIN)/python benchmarks/packed.py

slow: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow and not gpu"

chaos: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu and not soak" tests/resilience $$($(BIN)/python -m tests.resilience.rows)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "chaos and not gpu and not soak" --ignore tests/resilience tests

soak: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -s -m soak
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/recovery.py

layouts: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/parallel

gpu: $(DEV)
	$(BIN)/pytest -m gpu

lock: $(DEV)
	./scripts/check_lock.sh

clean:
	rm -rf .venv quickstart quickstart-own

$(RUNTIME): $(SETUP_INPUTS)
	./scripts/setup.sh
	touch $@

$(DEV): $(SETUP_INPUTS)
	./scripts/setup.sh dev
	touch $@ $(RUNTIME)
