# Two commands set everything up: `make demo` and `make test`; CONTRIBUTING.md has the others.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUNDLE ?= pycode.bundle
PROMPT ?= def parse_arguments(argv):
JOBS ?= 2

MINUTES ?= 10
EXACTNESS := $(foreach precision,fp32 int8 int4,benchmarks/results/exactness-$(precision).json)

# Tests are collected twice as fast when their bytecode is kept, which some machines' environments forbid.
export PYTHONDONTWRITEBYTECODE :=

.SECONDARY:

.PHONY: demo serve-demo docs test test-ci test-all nightly soak exactness structured operating tools mutation attack lint kernels bench dist clean

demo: $(BUNDLE)/manifest.json
	$(BIN)/specbuild inspect $(BUNDLE)
	@echo
	$(BIN)/specbuild generate $(BUNDLE) --prompt '$(PROMPT)' --max-new-tokens 96 --stats

# Starts a server on the reference bundle, streams a text into the terminal, and stops it.
serve-demo: $(BUNDLE)/manifest.json
	BIN=$(BIN) sh scripts/release/serve_demo.sh $(BUNDLE) '$(PROMPT)'

# Each process has a file at a time; more of them than cores are slower.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(OPTIONS)
MADE := build/made
# The long sweeps are scripts, which take what the tests and the benchmarks share.
SOAK := PYTHONPATH=.:tests/support $(BIN)/python tests/soak

# Every module and every backend at least once, in three minutes on two cores.
test: $(VENV)/.ready
	@rm -rf $(MADE) && mkdir -p $(MADE)
	$(PYTEST) --tier fast --made=$(MADE)

# What `make test` runs, and the tests that take a second or more.
test-ci: test
	$(PYTEST) --tier slow --made=$(MADE)

# What CI runs, and the tests that take longer.
test-all: test-ci
	$(PYTEST) --tier nightly --made=$(MADE)

# What CI leaves out.
nightly: test-all soak

# Every family on many prompts, property tests with many cases; build/soak.xml has each test and its time.
soak: exactness structured operating tools mutation
	$(PYTEST) --tier soak --junitxml build/soak.xml

# A real model in every precision, every way of decoding against plain decoding alone: hours, and goes on if stopped.
exactness: $(EXACTNESS)

benchmarks/results/exactness-%.json: build/smollm2-%.bundle/manifest.json
	$(SOAK)/exactness_sweep.py $(<D) --prompts tests/data/chats.jsonl --prompts tests/data/prompts.jsonl \
	  --out build/exactness-$*.json && mv build/exactness-$*.json $@

# 200 schemas and 50 regexes and grammars on a real model, every way: half an hour, and goes on if stopped.
structured: build/smollm2-int8.bundle/manifest.json
	$(SOAK)/structured_sweep.py $(<D) --out benchmarks/results/structured.json

# What docs/guides/operating.md and serving.md promise: simulations, and the reference pair behind a server.
operating: $(BUNDLE)/manifest.json build/pycode-int8.bundle/manifest.json
	$(BIN)/python -m benchmarks.serve.shadow_oracle float32=$(BUNDLE) int8=build/pycode-int8.bundle --flips 16 --out benchmarks/results/oracle.json

build/pycode-int8.bundle/manifest.json: $(VENV)/.ready
	$(BIN)/specbuild build --target engines/pycode/target --draft engines/pycode/draft --precision int8 --output $(@D) --force

# 300 conversations with tools on a real model, every way; goes on if stopped.
tools: build/smollm2-int8.bundle/manifest.json
	$(SOAK)/tool_sweep.py $(<D) --out benchmarks/results/tools.json

# Which mutants of 200 drawn lines of the decode core the tests kill; half an hour and more.
mutation: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[mutation]'
	$(SOAK)/mutation.py --out benchmarks/results/mutation.json

build/smollm2-%.bundle/manifest.json: build/smollm2/config.json
	$(BIN)/specbuild build --target $(<D) --precision $* $(if $(filter-out fp32,$*),--max-kl 2) --max-seq-len 1024 --output $(@D) --force

build/smollm2/config.json: | $(VENV)/.ready
	$(BIN)/python scripts/checkpoints/real_model.py $(@D)

# Hostile inputs of every kind for MINUTES, by a fresh SEED that it prints; ONLY=class:number tries a find again.
attack: $(BUNDLE)/manifest.json
	PYTHONPATH=tests/attacks:tests/support $(BIN)/python -m campaign --bundle $(BUNDLE) --minutes $(MINUTES) \
	  $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only '$(ONLY)') $(if $(CLASSES),--classes $(CLASSES)) \
	  $(if $(JSON),--json $(JSON))

# The site, in build/site; a warning fails it.
docs: $(VENV)/.ready
	$(BIN)/python scripts/release/package_tree.py build/package
	$(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/release/package_tree.py build/package --lint-imports
	cd build/package && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p specbuild
	@git ls-files '*.py' | xargs wc -l | awk '$$1 > 500 && $$2 != "total" { print "more than 500 lines:", $$2, $$1 }'

# Every kernel for every architecture, or for those in ARCH, by NVRTC; fails where registers spill.
kernels: $(VENV)/.ready
	@mkdir -p build
	$(BIN)/python -m scripts.gpu.kernels_report $(if $(ARCH),--cuda-arch $(ARCH) --out build/kernels-report.json)

bench: $(BUNDLE)/manifest.json
	$(BIN)/specbuild bench $(BUNDLE) --max-new-tokens 128 --ignore-eos --trees best:5
	$(BIN)/python -m benchmarks.cpu.memory
	$(BIN)/python -m benchmarks.cpu.graphs

$(BUNDLE)/manifest.json: $(VENV)/.ready
	$(BIN)/specbuild build --target engines/pycode/target --draft engines/pycode/draft --output $(BUNDLE) --force

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[build,dev]'
	@touch $@

# sdist, wheel, the versions that a server was installed with, an SBOM: what an offline machine and an auditor need.
dist:
	PYTHON=$(PYTHON) sh scripts/release/dist.sh

clean:
	rm -rf $(VENV) build *.bundle
