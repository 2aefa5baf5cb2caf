# Start with `make demo` or `make test`: both set up .venv. `make TORCH_INDEX=` takes torch from the
# package index, too. Other targets: `make install` (.venv alone), `make slow` (the long tests),
# `make pods` (compiles for TPU slices), `make lowest` and `make newest` (the tests with the
# lowest and the newest versions that setup.py allows), `make wheel` (a day with the wheel alone),
# `make docs` (the pages as a site), `make lint`, `make clean`.

ifndef PYTHON
PYTHON := $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
	$(shell $(name) -c '' 2>/dev/null && echo $(name))))
endif
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# A .venv of another Python, and one whose installation failed, has no such file.
INSTALLED := $(VENV)/installed-$(VERSION)
NEWEST_PYTHON ?= python3.13
ENCODERS ?= .encoders
# PyTorch's builds for CPUs: that of PyPI brings several GB of CUDA libraries, which nothing here
# uses.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

DEMO := demo
TOKENS := $(DEMO)/source/words

# Hides TensorFlow's messages about the machine.
export TF_CPP_MIN_LOG_LEVEL ?= 2
export TF_ENABLE_ONEDNN_OPTS ?= 0
# Python keeps the modules that it compiles: else each process would start 8 s later.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install torch demo test slow pods lowest newest wheel docs lint clean unusable

install: $(INSTALLED)

$(INSTALLED): setup.py $(CONSTRAINTS) $(if $(shell $(BIN)/python --version 2>/dev/null),,unusable)
	@case '$(VERSION)' in 3.11|3.12|3.13) ;; *) echo 'error: $(or $(PYTHON),python3) is Python' \
		'$(or $(VERSION),of no known version), expected 3.11 to 3.13: make PYTHON=python3.12' >&2; \
		exit 1;; esac
	@test -e $@ && $(BIN)/python --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(MAKE) --no-print-directory torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) \
		--editable '.[convert,text,test]'
# By all cores, which pip does not use. Some files in packages are templates, or for another Python.
	@$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# Asks first, because pip would try an index that is out of reach for minutes. Dependencies come with
# all else from the package index.
torch:
	@if test -z '$(TORCH_INDEX)'; then exit 0; fi; \
	$(BIN)/python -c \
		'from urllib.request import urlopen; urlopen("$(TORCH_INDEX)/torch/", timeout=9)' \
		2>/dev/null && \
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) \
		--no-deps --index-url '$(TORCH_INDEX)' torch || \
	echo 'torch comes from the package index: $(TORCH_INDEX) is out of reach'

# The whole way once, with the same commands as for real data. CHANGES are flags of the training,
# such as `make demo CHANGES=--config.seed=1`. Huge pages for a step's 200 MB of
# memory, and no fusions by YNNPACK: each takes a tenth from a step (benchmarks/README.md).
demo: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
demo: export XLA_FLAGS ?= --xla_cpu_experimental_ynn_fusion_type=
demo: $(INSTALLED)
	rm -rf $(DEMO)
	$(BIN)/python -m coyo11m_tfds.sample_data --out $(DEMO)/source
	$(BIN)/python -m coyo11m_tfds.embed_captions --source $(DEMO)/source --encoder words \
		--tokens_only --max_tokens 16 --out $(TOKENS)
	$(BIN)/python -m coyo11m_tfds.build --manual_dir=$(DEMO)/source --data_dir=$(DEMO)/data \
		--config='{"name": "words", "text_embeddings": "$(TOKENS)", "shard_bytes": 16777216}'
	$(BIN)/python -m train_lib.main --config=configs/demo.py --workdir=$(DEMO)/run $(CHANGES)
	@$(BIN)/python -m train_lib.demo --workdir=$(DEMO)/run

# Three processes, on two cores, take one file each, in the order of tests/conftest.py: many tests
# wait for their own processes and servers, and the files with the fewest tests take longest. After the crash
# of one, pytest-xdist 3.8 would start another and wait for ever.
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart=0

# Fetches real text encoders once (0.4 GB) and runs the long tests, such as random kills of builds.
slow: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
		--editable '.[dask,text-jax,wandb]' ipykernel ipywidgets nbclient
	$(BIN)/python -m pip install --quiet --no-deps diffusers==0.42.1
	$(BIN)/python tests/text/fetch_encoders.py --out $(ENCODERS)
	COYO11M_ENCODERS=$(ENCODERS) $(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest tests/train_lib/lifecycle/test_writers.py

# Downloads libtpu (0.3 GB), which compiles without a TPU.
pods: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[tpu]'
	$(BIN)/python -m pytest -m slow tests/train_lib/tools/test_compile.py

# Only the versions in setup.py are lowered, but torch: others bring several GB.
.lowest.txt: setup.py
	grep -oE "'[A-Za-z0-9_-]+(\[[a-z]+\])?>=[0-9.]+" setup.py | tr -d "'" | \
		sed -E 's/\[[a-z]+\]//; s/>=/==/; /^torch==/d' | sort -u > $@
	grep '^torch==' constraints.txt >> $@

# Old versions warn of what is no error.
lowest: .lowest.txt
	$(MAKE) install VENV=.venv-lowest CONSTRAINTS=.lowest.txt
	PYTHONWARNINGS=ignore::FutureWarning .venv-lowest/bin/python -m pytest -W default \
		--numprocesses 3 --dist loadfile tests/convert tests/dataset tests/source tests/storage \
		tests/text tests/test_builder.py tests/test_input_pipeline.py tests/reading/test_engines.py \
		tests/train_lib/learning/test_step.py tests/train_lib/test_train.py \
		tests/train_lib/lifecycle/test_checkpoint.py

# What a plain `pip install` brings today, so it is installed anew.
newest:
	rm -rf .venv-newest
	$(MAKE) test PYTHON=$(NEWEST_PYTHON) VENV=.venv-newest CONSTRAINTS=/dev/null

# Builds dist/, and tries it in an environment and a folder of its own.
wheel:
	PYTHON='$(PYTHON)' tests/wheel_day.sh

# Makes a site of README.md, of the pages to which it leads, and of docstrings, which are read and
# not imported: the environment has none of what the project needs. Ruff breaks long signatures.
# With --quiet, MkDocs would not count the warnings that --strict makes errors.
docs: .venv-docs/installed-$(VERSION)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo 'site/index.html'

.venv-docs/installed-$(VERSION): $(CONSTRAINTS)
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) \
		mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-lowest .venv-newest .venv-docs .lowest.txt
	rm -rf $(DEMO) $(ENCODERS) site build dist *.egg-info
