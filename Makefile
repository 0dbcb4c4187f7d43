# make run   set up, show what this machine can do, run one Kimi-K3 MoE layer and compare it with its expected values
# make test  set up and run the tests (no GPU, no root, under ten minutes)
# make lint  formatting, types and import direction

PYTHON ?= python3
VENV := $(or $(PORTAMOE_VENV),.venv)
BIN := $(VENV)/bin
DATA := tests/data/kimi-k3-tiny

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test lint format test-kernels check-isa check-sass test-flashinfer test-flashinfer-kernels test-cute test-containers clean env-run env-test env-dev

run: env-run
	$(BIN)/portamoe probe capabilities
	$(BIN)/portamoe run --checkpoint $(DATA) --layer 1 --input $(DATA)/expected/layer_1.safetensors \
	    --expected $(DATA)/expected/layer_1.safetensors --backend torch

test: env-test
	$(BIN)/python -m pytest -m "not kernels and not gpu"

# Interprets and compiles the Triton kernels; minutes, still without a GPU.
test-kernels: env-test
	$(BIN)/python -m pytest -m "kernels and not gpu"

# Compiles every AMD kernel on two Triton versions; fails on a spill, scratch, too much LDS or a missing matrix instruction.
check-isa: env-test
	$(BIN)/python benchmarks/isa_report.py --check --also 3.6.0

# Compiles the kernels of triton_fused for six NVIDIA targets; fails on a spill or a wgmma hazard. ALSO=3.6.0 adds a Triton version.
check-sass: env-test
	$(BIN)/python benchmarks/sass_check.py $(if $(ALSO),--also $(ALSO)) --tokens 1,8,64,512,8192

# Lints, builds and runs the images. Needs root and apt, which it uses to install the container tools.
test-containers:
	bash docker/ci/test-containers.sh

# Compares the adapters with the real FlashInfer, the pinned release and the newest, in an environment of their own.
test-flashinfer: env-test
	$(BIN)/python -m tests.flashinfer.contract.environment 0.7.2.post1 newest

# Compiles FlashInfer's CuteDSL kernel with SiTU for SM100, SM103 and SM107 after that; minutes, no GPU, not in CI.
test-flashinfer-kernels: test-flashinfer
	$(VENV)/flashinfer/bin/python tests/flashinfer/contract/compile_kernels.py

# Compiles the CuteDSL kernels for SM90, SM100, SM103 and SM107 in an environment of their own; no GPU.
test-cute: env-test
	$(BIN)/python -m tests.skinny.cute_contract.environment

# Compares the plug-in with the real vLLM, the newest or VLLM=<version>, in an environment of its own.
test-vllm: env-test
	$(BIN)/python -m tests.vllm.contract.environment $(VLLM)

lint: env-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=common:. $(BIN)/lint-imports

format: env-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env-run env-test env-dev: env-%:
	@$(PYTHON) scripts/bootstrap.py $*

clean:
	rm -rf .venv build dist
