# Two commands do everything: `make demo` and `make test`. Each sets up what it needs.

VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check lint format bench chaos chaos-sqlite chaos-postgres docs screenshots clean

N ?= 1000
STORE ?= sqlite
MINUTES ?= 60

help:
	@echo "make demo    set up and start the demo (no API key needed)"
	@echo "make test    set up and run everything: lint, types, tests"
	@echo "make check   lint and types only"
	@echo "make format  format the code"
	@echo "make bench   measure us, the least that could be done, and the bare loop, as ratios"
	@echo "make bench STORE=postgres   the same on PostgreSQL, with its defaults"
	@echo "make chaos   kill real processes N=1000 times, fill disks, move clocks, and check what is left"
	@echo "make chaos STORE=postgres MINUTES=60   the same on PostgreSQL: also stop processes, lose replies, restart it"
	@echo "make docs    build the documentation into site/, offline"
	@echo "make screenshots  picture each view of the page, light, dark and phone, into screenshots/"
	@echo "make clean   remove what make has made"

demo: $(VENV)/.demo
	@$(BIN)/assent demo --page || [ $$? = 130 ]  # 130: Ctrl-C, which is a fine way to leave

test: lint
	scripts/test $(BIN)

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

chaos-sqlite: $(VENV)/.dev
	$(BIN)/python tests/chaos/driver.py --kills $(N)
	$(BIN)/python tests/chaos/power.py --cuts $$((2 * $(N)))

chaos-postgres: $(VENV)/.dev
	$(BIN)/python tests/chaos/postgres.py --minutes $(MINUTES)

docs: $(VENV)/.dev
	$(BIN)/python scripts/docs build

screenshots: $(VENV)/.dev
	$(BIN)/python scripts/screenshots.py screenshots

$(VENV)/.demo: pyproject.toml scripts/setup
	scripts/setup $(VENV) '.[server]'
	@touch $@

$(VENV)/.dev: pyproject.toml scripts/setup
	scripts/setup $(VENV) '.[dev]'
	@touch $(VENV)/.demo $@

clean:
	rm -rf $(VENV) screenshots .pytest_cache .ruff_cache .hypothesis site assent-demo.db*
