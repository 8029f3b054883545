# One command each: `make setup`, `make test`, `make demo`, `make check`, `make docs`, `make test-targets`,
# `make test-extras`, `make gpu-check`, `make gpu-wheels`, `make train-gpu`, `make model-pieces`, `make soak`, `make clean`.
#
# The torch build: pip takes the one its index prefers, with CUDA on Linux. On a machine without an NVIDIA GPU, a CPU
# build spares gigabytes. To choose one, name the index that PyTorch's install page gives for it, or another version:
#
#     make setup TORCH_FLAGS="--index-url <index of the build you want>"
#     make setup TORCH="torch==2.12.0"
#
# TRANSFORMERS="transformers==5.24.0" pins that one; PYTHON picks the interpreter of the environment.
#
# On a machine that has everything installed and no network, `SETUP= HF_DCUT=hf-dcut` leaves the set-up out.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
TRANSFORMERS ?=
PYTEST_FLAGS ?=
JOBS ?= 2
MINUTES ?= 30
SETUP ?= setup
HF_DCUT ?= $(BIN)/hf-dcut
NEWEST := transformers>=5.24,<6
WHEELS ?= wheels
PIECES ?= pieces

BIN := $(VENV)/bin
MODEL := models/smollm2-135m-instruct
PIP := $(BIN)/python -m pip --disable-pip-version-check

# `python -m` must not put the repository on sys.path: ./hf_dcut alone is not the whole package, see pyproject.toml.
export PYTHONSAFEPATH := 1

.PHONY: setup test test-targets test-extras demo check docs package gpu-check gpu-wheels train-gpu model-pieces soak
.PHONY: clean distclean

setup: $(VENV)/.installed $(MODEL)/config.json

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade "pip>=24" "setuptools>=77"
	$(PIP) install --quiet $(TORCH_FLAGS) "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --editable ".[dev]" $(if $(TRANSFORMERS),"$(TRANSFORMERS)")
	touch $@

$(MODEL)/config.json: | $(VENV)/.installed
	$(BIN)/python examples/prepare_smollm2.py --out $(MODEL)

# JOBS processes share the test files; each has one thread, so that none waits for another's core.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --durations=5 $(PYTEST_FLAGS)

# Every combination of every architecture in tests/targets, and docs/targets.md anew.
test-targets: setup
	$(BIN)/python -m pytest tests/targets --grid $(PYTEST_FLAGS)

# What joins with other packages, which this brings: TRL, lm-evaluation-harness, Ray.
test-extras: setup
	$(PIP) install --quiet --editable ".[dev,frameworks,ray]"
	$(BIN)/python -m pytest -m extras $(PYTEST_FLAGS)

demo: setup
	$(BIN)/hf-dcut bench --batch 16 --prompts 16 --max-new-tokens 64 --rounds 2 --show 3

check: $(VENV)/.installed package
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd build/package && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p hf_dcut

# The pages, under build/site; a warning is an error.
docs: $(VENV)/.installed package
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --site-dir build/site

# mypy and mkdocs read an installed copy, since they cannot follow the package map. What an earlier build left under
# build/lib would go into the copy, so it is cleared first.
package: $(VENV)/.installed
	rm -rf build
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/package .

# Everything a GPU must show, in eight minutes; a page with the numbers lies beside the JSON file. docs/kernels.md
gpu-check: $(SETUP)
	$(HF_DCUT) gpu-check --out docs/benchmarks/gpu_check.json $(if $(COMMIT),--commit $(COMMIT))

# What a GPU machine without network may lack: hf-dcut and whatever pure Python it and Transformers need, as wheels. What
# is compiled is not among them, since that belongs to the machine.
gpu-wheels: $(VENV)/.installed
	rm -rf $(WHEELS) build/lib build/bdist.*
	$(PIP) download --quiet --only-binary :all: --dest $(WHEELS) "$(or $(TRANSFORMERS),$(NEWEST))" gguf
	$(PIP) download --quiet --only-binary :all: --no-deps --dest $(WHEELS) accelerate filelock
	find $(WHEELS) -name '*.whl' ! -name '*-none-any.whl' -delete
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEELS) .
	git describe --always --dirty=+ > $(WHEELS)/COMMIT
	du -sh $(WHEELS)

# A drafter for the small model in eight minutes on one large GPU, docs/training.md; PROMPTS is a JSON-lines file.
train-gpu: $(SETUP)
	$(HF_DCUT) train --target $(MODEL) --prompts "$(PROMPTS)" --out drafter-gpu --time-budget 8m --dtype bfloat16 \
		--start examples/drafter --slots 512 --batch 256 --anchors 32 --learning-rate 1e-3

# The small model's file in pieces, for a machine without network; `examples/prepare_smollm2.py --join` is its other half.
model-pieces: $(VENV)/.installed
	$(BIN)/python examples/prepare_smollm2.py --split $(PIECES)

# Half an hour of requests that come, go, fail and are evicted: every text the same, memory flat. MINUTES shortens it.
soak: setup
	$(BIN)/python tests/soak/soak.py --minutes $(MINUTES)

# The environment and the model stay; `make distclean` takes them too.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(MODEL)
