# Two commands do all set-up by themselves: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
CHAOS := runs/chaos

.PHONY: demo test test-slow test-eval browser bench-page chaos format clean docs serve-docs

# Each step leaves its mark when it has ended well, so that an interrupted one is done again.
$(VENV)/.made:
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Installed once, and again only when the requirements change; an editable install follows the sources.
$(VENV)/.core: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Threads that wait without spinning: on a busy machine the default is ten times slower.
demo: export OMP_WAIT_POLICY = PASSIVE
demo: $(VENV)/.core
	$(BIN)/meristem data prepare --builtin --out $(DEMO)-data
	$(BIN)/meristem plan --layers 6 --width 128 --heads 4 --dims 128,64,32 --vocabulary 320 --context 256 --against uniform
	$(BIN)/meristem train configs/demo.toml --out $(DEMO) --continue
	$(BIN)/meristem eval $(DEMO)
	$(BIN)/meristem generate $(DEMO) --prompt "def " --tokens 250
	$(BIN)/meristem report $(DEMO)

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test-slow: $(VENV)/.dev
	$(BIN)/pytest -m "slow or browser"

# Those of zero-shot tasks too, which are skipped where lm-evaluation-harness is not: it brings 300 MB along.
test-eval: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/evaluation tests/docs

# The browser in which pages are tested, from the system's packages; without it these tests are skipped.
browser:
	@command -v chromium || { SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); $$SUDO apt-get update && $$SUDO apt-get install -y chromium; }

bench-page: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m bench_page

# What is killed, damaged, fuzzed or starved survives or is refused clearly: minutes, or with FULL=1 the required counts.
chaos: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m chaos $(if $(FULL),--full) $(if $(SEED),--seed $(SEED)) --out $(CHAOS) $(ATTACKS)

# The documentation as a site, in runs/site; its tools are installed once.
$(VENV)/.docs: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet
	@echo "runs/site/index.html"

serve-docs: $(VENV)/.docs
	$(BIN)/mkdocs serve

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs
