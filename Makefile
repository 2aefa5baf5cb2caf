# Start with `make demo` or `make test`: both set up .venv.
# Other targets: `make slow` (the long tests), `make pods` (compiles for TPU slices), `make lint`,
# `make clean`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed
ENCODERS ?= .encoders

DEMO := demo
TOKENS := $(DEMO)/source/words

# Hides TensorFlow's messages about the machine.
export TF_CPP_MIN_LOG_LEVEL ?= 2
export TF_ENABLE_ONEDNN_OPTS ?= 0
# Python keeps the modules that it compiles: else each process would start 8 s later.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow pods lint clean

$(INSTALLED): setup.py constraints.txt
	$(PYTHON) -m venv .venv
# Python compiles the few modules that are used: to compile all of them takes 45 s.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
		--editable '.[convert,text,test]'
	touch $@

# The whole way once, with the same commands as for real data. Huge pages for a step's 200 MB of
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
	$(BIN)/python -m train_lib.main --config=configs/demo.py --workdir=$(DEMO)/run
	@$(BIN)/python -m train_lib.demo --workdir=$(DEMO)/run

# Three processes, on two cores, take one file each, in the order of names: many tests wait for
# their own processes and servers, and the files with the fewest tests take longest.
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Fetches real text encoders once (0.4 GB) and runs the long tests, such as random kills of builds.
slow: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dask,text-jax,wandb]'
	$(BIN)/python -m pip install --quiet --no-deps diffusers==0.42.1
	$(BIN)/python tests/text/fetch_encoders.py --out $(ENCODERS)
	COYO11M_ENCODERS=$(ENCODERS) $(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest tests/train_lib/test_writers.py

# Downloads libtpu (0.3 GB), which compiles without a TPU.
pods: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[tpu]'
	$(BIN)/python -m pytest -m slow tests/train_lib/tools/test_compile.py

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv $(DEMO) $(ENCODERS) build *.egg-info
