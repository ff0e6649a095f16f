# Everything a developer runs. Each target sets up what it needs; `make` alone lists them.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCKER_ENGINE ?=
comma := ,
BENCHMARKS = $(subst $(comma), ,$(BENCH))
PYTEST_FLAGS ?=
# Whose wheels of pyps `make wheel` builds, each with its Python.h: pybind11 has no wheel for all of them.
PYTHONS ?= $(BIN)/python
# Processes that run tests; one that has done with its own takes over from another.
TESTS_AT_ONCE ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist worksteal --ignore=tests/compose --ignore=tests/engines

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-everything simulate check format proto fuzz robustness bench experiments wheel test-compose test-engines docs pictures screenshots clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F '\t' '{printf "  make %-14s %s\n", $$1, $$2}'

install: $(STAMP) ## Make .venv with the pinned versions of everything

# Redone when what is installed would change; Python files need nothing, the installation is editable.
$(STAMP): pyproject.toml client/pyproject.toml constraints.txt CMakeLists.txt client/CMakeLists.txt $(wildcard csrc/*)
	@test -n "$(PYTHON)" || { echo "pyps needs Python 3.11 or later with its venv module; none is on the PATH (set PYTHON=/path/to/python3.11)." >&2; exit 1; }
	@command -v g++ >/dev/null || command -v c++ >/dev/null || { echo "pyps needs a C++20 compiler for its kernels; g++ is not on the PATH (on Debian: apt-get install g++)." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and the rest into $(VENV): a minute or two."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^pip==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --build-constraint constraints.txt \
		--editable 'client[torch]' --editable '.[demo,dashboard,top]' --group dev
	@touch $(STAMP)

demo: $(STAMP) ## Watch four workers train on real data; PROTOCOL=softsync:n=2 STALENESS=none OPTIMIZER=adam change how
	$(BIN)/pyps demo --picture out/demo.png $(if $(PROTOCOL),--protocol '$(PROTOCOL)') $(if $(STALENESS),--staleness '$(STALENESS)') \
		$(if $(OPTIMIZER),--optimizer '$(OPTIMIZER)') $(if $(WARMUP),--warmup '$(WARMUP)')

test: $(STAMP) ## Run the tests that every change has to pass, in a few minutes
	$(PYTEST) -m 'not extended' $(PYTEST_FLAGS)

test-all: ## Run everything: the tests that take long too, containers, the demo, quick benchmarks and experiments
	@$(MAKE) --no-print-directory --keep-going test-everything simulate test-compose test-engines demo bench experiments BENCH=quick

test-everything: $(STAMP)
	$(PYTEST) $(PYTEST_FLAGS)

simulate: $(STAMP) ## Play ten thousand histories of faults, 5 minutes; HISTORIES=100000 SEED=1
	$(BIN)/python -m tests.simulation --histories $(or $(HISTORIES),10000) --seed $(or $(SEED),0) --processes $(TESTS_AT_ONCE)
	$(BIN)/python -m tests.simulation --histories 5000 --processes $(TESTS_AT_ONCE) --mutants

check: $(STAMP) ## Run linters, type checks, import rules, sanitizers; see that generated code is fresh
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')
	$(BIN)/python -m pytest --quiet tests/unit/test_import_rules.py
	scripts/check_generated.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/sanitize.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" python scripts/check_vectorised.py
	$(BIN)/python scripts/mutants.py --check

format: $(STAMP) ## Format all sources
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h')

proto: ## Generate client/pyps_wire/*_pb2* from proto/
	scripts/generate_proto.sh

fuzz: $(STAMP) ## Fuzz the C++ that reads bytes of others, with clang's libFuzzer; SECONDS=600
	$(BIN)/python scripts/fuzz.py --seconds $(if $(SECONDS),$(SECONDS),60)

robustness: $(STAMP) ## As root: one fault a run, then a soak of MINUTES=20; renews docs/robustness.md in two hours
	$(BIN)/python benchmarks/faults.py --json out/robustness/faults.json
	$(BIN)/python benchmarks/soak.py --minutes $(or $(MINUTES),20) --json out/robustness/soak.json
	$(BIN)/python benchmarks/document.py out/robustness --into docs

bench: $(STAMP) ## Measure everything, 30 minutes; BENCH=quick: a few, BENCH=rounds,link: some; PEERS=folder of the peers' scripts
	@test -z "$(PEERS)" || $(BIN)/python -m pip install --quiet --constraint constraints.txt grpcio-tools
	$(BIN)/python benchmarks/bench.py $(if $(filter quick,$(BENCHMARKS)),--quick) \
		$(if $(filter-out quick,$(BENCHMARKS)),--only '$(filter-out quick,$(BENCHMARKS))') $(if $(PEERS),--peers '$(PEERS)')

experiments: $(STAMP) ## Judge the papers' claims in virtual time, within an hour; BENCH=quick: short runs without verdicts
	$(BIN)/python -m experiments $(if $(filter quick,$(BENCHMARKS)),--quick)

# A wheel's tag says how old a glibc its module still runs with: auditwheel reads that from the symbols that it asks for.
wheel: $(STAMP) ## Build the wheels of both distributions into dist/ (PYTHONS="python3.11 python3.12": pyps for each)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group wheel
	rm -rf dist build/wheels
	$(BIN)/python -m pip wheel --quiet --build-constraint constraints.txt --no-deps --wheel-dir build/wheels ./client
	@for python in $(PYTHONS); do (set -x; $(BIN)/python -m pip --python "$$python" wheel --quiet --no-cache-dir \
		--build-constraint constraints.txt --no-deps --wheel-dir build/wheels .) || exit; done
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --only-plat --wheel-dir dist build/wheels/*.whl
	@ls dist/*.whl

test-compose: $(STAMP) ## Build the images and train in containers (DOCKER_ENGINE: a script whose `up` starts an engine)
	@ls docker/wheels/torch-*.whl >/dev/null 2>&1 || $(BIN)/python -m pip download --quiet --no-deps \
		--constraint constraints.txt --dest docker/wheels torch
	DOCKER_ENGINE="$(DOCKER_ENGINE)" $(BIN)/python -m pytest tests/compose $(PYTEST_FLAGS)

# Programs of the system's packages are installed where that may be done; without them their tests are skipped, by name.
test-engines: $(STAMP) ## Run pyps under Ray, Slurm, Kubernetes' tools and TorchX, each the real one
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group engines
	scripts/install_engines.sh
	DOCKER_ENGINE="$(DOCKER_ENGINE)" $(BIN)/python -m pytest tests/engines $(PYTEST_FLAGS)

pictures: $(STAMP) ## Draw the pictures of docs/protocols.md and docs/simulate.md, in virtual time
	$(BIN)/python experiments/protocol_pictures.py --into docs/images
	$(BIN)/pyps simulate examples/simulated_digits.py --workers 16 --slow 4x2,2x5 --step-seconds 200ms --bandwidth 1gbit --latency 1ms \
		--failures 600,30 --protocol async,backup:b=4,hardsync --rate 0.3,1 --epochs 40 --target 0.04 --out out/simulated_digits
	cp out/simulated_digits/simulation.png docs/images/simulate.png

screenshots: $(STAMP) ## Take the picture of docs/dashboard.md with Chromium, of a run of two minutes
	$(BIN)/python scripts/screenshots.py

docs: $(STAMP) ## Build the site of docs/ into out/site, with every link looked at
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	rm -rf out/site
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --doctree-dir build/site docs out/site
	@echo "out/site/index.html"

clean: ## Remove what was built; .venv stays
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pyps client tests -name __pycache__ -type d -prune -exec rm -rf {} +
