# The commands of a contributor. `make` lists them. Targets set up what they need, in .venv and rust_core/target.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# Processes that run Python tests. Most tests wait for child processes.
PROCESSES ?= 3
VENV := .venv
DIST ?= dist
BIN := $(VENV)/bin
# With PYO3_NO_PYTHON, pyo3 does not search PATH for an interpreter, so a changed PATH causes no rebuild.
CARGO := PYO3_NO_PYTHON=1 PYO3_BUILD_EXTENSION_MODULE=1 cargo
MANIFEST := rust_core/Cargo.toml

# The target directory of cargo. With CARGO_TARGET_DIR, it is outside the clone, and a fresh clone reuses the build.
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),rust_core/target))

# Options of a test run: skip the tests listed in PASSED, write JUNIT, run one part (SHARD=2/4), include the long tests
# (ALL=1). Torch uses one thread: on a busy machine, more threads spend most of their processor time waiting for each other.
PYTEST = PATH="$(abspath $(CHECKED)):$(abspath $(BIN)):$$PATH" PYTHONPATH=$(abspath $(CHECKED)) OMP_NUM_THREADS=1 \
	$(BIN)/python -m pytest \
	$(if $(JUNIT),--junitxml=$(JUNIT) -o junit_duration_report=total) $(if $(SHARD),--shard $(SHARD)) \
	$(if $(PASSED),--resume-from $(PASSED)) $(if $(ALL),,-m "not nightly")
RUN_TESTS = $(PYTHON) tools/run_tests.py $(if $(RESUME),--resume) $(if $(LINT),--lint) $(if $(SHARD),--shard $(SHARD))

# A stamp is stored in the environment that it describes, and is removed with it.
INSTALLED := $(VENV)/.installed
CORE := $(VENV)/.persia-core
BINARIES := $(VENV)/.persia-binaries
PACKAGE := $(VENV)/.persia
NVRTC := $(VENV)/nvrtc/.installed
# The Python tests use the build of the Rust tests, with debug assertions.
CHECKED := $(VENV)/checked
PEERS := .venv-peers/.installed
RELEASING := .venv-release/.installed
RUST := $(shell find rust_core \( -name target -o -name fuzz \) -prune -o -type f \
	\( -name '*.rs' -o -name '*.toml' -o -name '*.py' -o -name '*.pyi' -o -name Cargo.lock -o -name '*.ptx' \) -print)

.PHONY: help setup demo up down images third-party test test-all test-build test-layers test-images test-rust test-python test-compose test-cold \
	test-flaky test-gpu chaos chaos-all chaos-phases clean-hour fuzz lint lint-rust lint-python format bench bench-gpu wheels release \
	next-version upgrade-data lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(INSTALLED) $(NVRTC) $(CORE) $(BINARIES) $(PACKAGE) ## Build and install everything into .venv (the other targets do this when needed)

demo: setup ## Train a DLRM on Census-Income and draw its curves
	$(BIN)/python examples/dlrm/train.py

up: ## Start the stack in containers and show its logs (missing images are built)
	@tools/compose_plugin.sh && tools/base_image.sh
	docker compose up

down: ## Stop and remove the stack's containers; its volumes remain
	docker compose down

images: ## Build the images of the stack
	@tools/compose_plugin.sh && tools/base_image.sh
	docker compose build

third-party: ## Build the engine of this clone into third_party/, where it overrides the packaged one (PROFILE=dev for debugging, FEATURES=cuda)
	@tools/compose_plugin.sh && tools/base_image.sh
	docker compose -f docker-compose.dev.yaml build
	PERSIA_UID=$$(id -u) PERSIA_GID=$$(id -g) BUILD=$$(git describe --always --dirty) PROFILE=$(PROFILE) FEATURES=$(FEATURES) \
		docker compose -f docker-compose.dev.yaml run --rm dev ../tools/third_party.sh

test: | $(BIN)/python ## Run the tests, images included (RESUME=1 continues an interrupted run, SHARD=2/4 runs a part)
	$(RUN_TESTS)

test-all: | $(BIN)/python ## Run every test: also all faults, storms, the image's whole suite, wheels, fuzzing (RESUME=1, SHARD=2/4)
	$(RUN_TESTS) --all

# Compile the Rust tests, the extension and the servers together, and copy the results, because another clone may build into TARGET.
# Each copy is replaced in one step, and only if it differs, because `make test` repeats this target while it builds images from the copies.
test-build: $(INSTALLED) $(NVRTC) $(PACKAGE)
	$(CARGO) build --manifest-path $(MANIFEST) --workspace --all-targets --all-features --locked
	@mkdir -p $(CHECKED)/persia_core
	@ln -sf $(filter-out %.so,$(wildcard $(CURDIR)/rust_core/core/python/persia_core/*)) $(CHECKED)/persia_core/
	@copy() { cmp -s "$$1" "$$2" || { cp "$$1" "$$2.new"; mv -f "$$2.new" "$$2"; }; }; \
	copy $(TARGET)/debug/libpersia_core.so $(CHECKED)/persia_core/persia_core.abi3.so; \
	for name in persia-embedding-sharded-server persia-embedding-sharded-middleware; do copy $(TARGET)/debug/$$name $(CHECKED)/$$name; done

# Without a Docker engine the tests in containers are reported as skipped.
HAS_DOCKER := docker version >/dev/null 2>&1

# The layers of the images that do not depend on the engine.
test-layers:
	@! $(HAS_DOCKER) || { tools/compose_plugin.sh && tools/base_image.sh && tools/image_layers.sh; }

# The source of the engine in the images of a test run.
ENGINE ?= $(if $(ALL),build,$(shell tools/image_engine.sh))

# With BUILT=1, `make test-build` has just run, and tests may run beside this target.
test-images: $(if $(BUILT),,test-build)
	@! $(HAS_DOCKER) || [ "$(ENGINE)" = build ] || PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/prebuilt_engine.py $(CHECKED)
	@! $(HAS_DOCKER) || { echo "the engine of the images: $(ENGINE)"; ENGINE=$(ENGINE) $(MAKE) --no-print-directory images; }

test-rust: test-build ## Run the Rust tests (T=name for some)
	@rm -f rust_core/target/nextest/default/junit.xml
	@code=0; PATH="$(abspath $(BIN)):$$PATH" $(CARGO) nextest run --manifest-path $(MANIFEST) --workspace --all-targets --all-features \
		--locked $(if $(SHARD),--partition hash:$(SHARD)) $(T) || code=$$?; \
	$(if $(JUNIT),cp rust_core/target/nextest/default/junit.xml $(JUNIT) || code=1;) exit $$code
	$(CARGO) test --manifest-path $(MANIFEST) --workspace --all-features --locked --quiet --doc

test-python: test-build ## Run the Python tests (T=path or T="-k name" for some)
	$(PYTEST) $(or $(T),tests) --ignore=tests/compose --numprocesses $(PROCESSES) --dist worksteal

test-compose: test-images ## Run the tests of the stack in containers (skipped without a Docker engine)
	ENGINE=$(ENGINE) $(PYTEST) $(or $(T),tests/compose)

# Check that every row of the checklist that this version claims is shown by a test.
test-checklist:
	$(BIN)/python tools/checklist.py

# Python tests with trainers that are started as users start them, and with torch's own number of threads.
COLD := $(addprefix tests/unit/test_,checkpoints.py example.py launch.py one_batch.py serving_faults.py watchdog.py)
test-cold: test-build
	PERSIA_TEST_FORK=0 $(subst OMP_NUM_THREADS=1,,$(PYTEST)) tests/integration $(COLD) --numprocesses $(PROCESSES) --dist worksteal

test-flaky: test-build ## Run tests N times with all processors busy (T=tests/unit/test_peers.py, or T=rust:name; N=20)
	$(BIN)/python tools/busy.py $(if $(filter rust:%,$(T)),\
		$(CARGO) nextest run --manifest-path $(MANIFEST) --workspace --all-features --locked --stress-count $(or $(N),20) $(T:rust:%=%),\
		env $(PYTEST) -m "" --repeat $(or $(N),20) $(or $(T),$(error name tests: T=tests/unit/test_peers.py)) --numprocesses $(PROCESSES) --dist worksteal)

test-gpu: setup ## Run the tests that need a CUDA device; fails without one
	tools/test_gpu.sh

chaos: setup ## Inject one fault into a running job and check the rows afterwards (F=F3 SEED=7; F=F26 SECONDS=600 is a storm)
	PYTHONPATH=tests $(BIN)/python tests/chaos/run_faults.py $(or $(F),--help) $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

chaos-all: setup ## Inject every fault, one after another, and add the results to runs/chaos.json (SEED=7)
	PYTHONPATH=tests $(BIN)/python tests/chaos/run_faults.py all $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

chaos-phases: setup ## Inject faults into each phase of a run, by seed (SEEDS=17 repeats a case; SEEDS=1-300 SHARD=2/4; SEEDS=table)
	PYTHONPATH=tests $(BIN)/python tests/chaos/run_phases.py $(or $(SEEDS),--help) $(if $(SHARD),--shard $(SHARD))

clean-hour: setup ## Train a job without a fault, with all alerts and the search for leaks; any alarm is a failure (MINUTES=60)
	PYTHONPATH=tests:tests/integration $(BIN)/python tests/integration/clean_job.py $(if $(MINUTES),--minutes $(MINUTES))

fuzz: ## Fuzz the code that parses untrusted input (T=manifest SECONDS=60; without T all targets, one after another)
	tools/fuzz.sh $(or $(SECONDS),60) $(T)

lint: lint-rust lint-python ## Check formatting, types, lints and the direction of dependencies

lint-rust: $(INSTALLED) ## Check the Rust half
	@cargo fmt --version >/dev/null && cargo clippy --version >/dev/null || \
		{ echo "missing: rustfmt or clippy: rustup component add rustfmt clippy" >&2; exit 2; }
	$(CARGO) fmt --manifest-path $(MANIFEST) --all --check
	$(CARGO) clippy --manifest-path $(MANIFEST) --workspace --all-targets --all-features --locked -- -D warnings
	$(CARGO) clippy --manifest-path $(MANIFEST) --package persia-core --locked -- -D warnings
	$(CARGO) metadata --manifest-path rust_core/fuzz/Cargo.toml --locked --format-version 1 >/dev/null
	@if cargo deny --version >/dev/null 2>&1; then \
		cd rust_core && cargo deny --locked check bans licenses sources; \
	else $(BIN)/python tools/check_crates.py; fi

lint-python: $(INSTALLED) $(PACKAGE) ## Check the Python half
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python tools/check_layers.py

format: $(INSTALLED) ## Format Rust and Python, and fix what can be fixed
	$(CARGO) fmt --manifest-path $(MANIFEST) --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup $(PEERS) ## Measure against the peers and write runs/bench.json (BENCH=--quick for a short run)
	$(BIN)/python benches/run.py $(BENCH)

bench-gpu: setup ## Measure on a CUDA device and write runs/bench-gpu.json (BENCH=--quick for a short run)
	$(BIN)/python benches/on_gpu.py $(BENCH)

wheels: $(INSTALLED) ## Build the wheels of persia_core and persia into dist/ (or DIST=elsewhere)
	cd rust_core/core && $(CURDIR)/$(BIN)/maturin build --release --locked --out $(abspath $(DIST))
	cd persia_py && $(CURDIR)/$(BIN)/hatchling build --target wheel --directory $(abspath $(DIST))

.PHONY: site
SITE := .venv-site/.installed
# Every page is read again: warnings about pages that are read from a cache would be lost.
site: $(SITE) ## Build the documentation site into site/ (a warning is an error; open site/index.html)
	@rm -rf site
	.venv-site/bin/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet --conf-dir docs --doctree-dir .venv-site/doctrees . site
	$(PYTHON) tools/check_site.py site

# IMAGES=0 omits the images. REHEARSE=1 accepts any sources, and writes to dist/rehearsal. With REHEARSE=1, BORROW=.venv tests with
# the packages of .venv instead of downloads. LTO=false builds faster.
release: $(RELEASING) ## Build a release from a clean clone and verify it: wheels, images, bills of materials, checksums (IMAGES=0, REHEARSE=1)
	.venv-release/bin/python tools/release.py $(if $(filter 0,$(IMAGES)),--no-images) $(if $(REHEARSE),--rehearse) \
		$(if $(BORROW),--borrow $(abspath $(BORROW))) $(if $(LTO),--lto $(LTO))

next-version: ## Set the version of the next release in all files and close its section of the changelog (V=0.2.0)
	@$(PYTHON) tools/release_source.py $(V)

upgrade-data: test-build ## Write the checkpoint and the log of this version, once, for the tests of later versions
	PATH="$(abspath $(CHECKED)):$(abspath $(BIN)):$$PATH" PYTHONPATH=$(abspath $(CHECKED)) $(BIN)/python tests/upgrade_job.py

# The images get the versions that are used in development.
lock: $(INSTALLED) ## Update the lock files from requirements/*.in
	lock() { \
		$(BIN)/uv pip compile --universal --python-version 3.10 --generate-hashes --upgrade --quiet \
			--no-header --no-annotate --no-emit-index-url "requirements/$$1.in" -o "requirements/$$1.txt" "$${@:2}"; \
	}; \
	lock dev; lock peers; lock site; lock serving-peers; lock serving-clients; \
	for name in serving runtime test persiaml release; do lock "$$name" --constraint requirements/dev.txt; done

clean: ## Remove the environment and everything that was built (runs/ remains)
	rm -rf $(VENV) .venv-peers .venv-release .venv-serving-peers .venv-site docs/reference/api site dist \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis rust_core/target

$(BIN)/python:
	@tools/check_machine.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): requirements/dev.txt | $(BIN)/python
	@tools/check_machine.sh $(BIN)/python
	@echo "installing the locked requirements into $(VENV) (PyTorch and its libraries take a few minutes, once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

# The compiler of the CUDA kernels is installed separately, because PyTorch contains a newer one.
$(NVRTC): requirements/nvrtc.txt $(INSTALLED)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --upgrade --target $(@D) -r $<
	@touch $@

$(PEERS): requirements/peers.txt | $(BIN)/python
	$(PYTHON) -m venv .venv-peers
	@echo "installing what is measured against into .venv-peers (a few minutes, once)"
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/peers.txt
	@touch $@

$(SITE): requirements/site.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/site.txt
	@touch $@

$(RELEASING): requirements/release.txt | $(BIN)/python
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/release.txt
	@touch $@

# The stamp has the start time of the build. A file that is saved during the build therefore causes another build.
$(CORE): $(RUST) $(INSTALLED)
	@start=$$(mktemp) && trap 'rm -f "$$start"' EXIT && \
		(cd rust_core/core && VIRTUAL_ENV=$(CURDIR)/$(VENV) $(CURDIR)/$(BIN)/maturin develop --release --locked) && \
		touch -r "$$start" $@

# The binaries are linked, so that .venv/bin has every command of the project.
$(BINARIES): $(RUST) | $(CORE)
	@start=$$(mktemp) && trap 'rm -f "$$start"' EXIT && \
		$(CARGO) build --manifest-path $(MANIFEST) --package persia-embedding-sharded-server --release --locked \
			--target-dir rust_core/target && \
		for name in server middleware; do \
			ln -sf "$(CURDIR)/rust_core/target/release/persia-embedding-sharded-$$name" $(BIN)/; \
		done && touch -r "$$start" $@

$(PACKAGE): persia_py/pyproject.toml $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable persia_py
	@touch $@
