# Works with GNU make 3.81 (macOS). Everything is installed into .venv of this checkout on first use.
PYTHON ?=
TORCH_ARGS ?=
MINUTES ?= 10
BUDGET ?= 540
PAGE ?= build/gpu.md
GPU_ARGS ?=
DEVICE ?= cuda
export PYTHON TORCH_ARGS
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Two processes share the tests; those that need the cores for themselves come after.
SHARED := -n 2 --dist worksteal
# Kernels to compile are given out one at a time, so that the largest, which come first, end early.
LARGEST_FIRST := -n 2 --dist load --maxschedchunk 1
ALONE := $(shell grep -rlE --include='*.py' 'mark\.alone' tests 2>/dev/null)
SETUP := sh scripts/setup.sh
CPU_TESTS := $(wildcard tests/null tests/conformance tests/backends/cpu)
CODEGEN_TESTS := tests/backends/triton/test_codegen.py
ELSEWHERE := --ignore=$(CODEGEN_TESTS) --ignore=tests/backends/metal
TRITON_TESTS := tests/conformance tests/backends/triton --ignore=$(CODEGEN_TESTS) --rows triton \
	tests/api/test_groups.py::test_each_group_is_attention_of_its_own -k triton
WEBGPU_TESTS := tests/conformance tests/backends/webgpu --rows webgpu
# For SwiftShader: without the test of 70,000 packed members, and that of a forked child, which launches nothing.
SHORTER := not B_big_10 and not fork_after_use
WITHOUT_LONG := -k '$(SHORTER)'
# Nor, by default, the conformance suite in 16 bits, which lavapipe runs; tests/backends/webgpu has them on both.
FOR_SWIFTSHADER = -k '$(SHORTER)$(if $(SLOW),, and not (webgpu- and float16))'
GPU_TESTS := tests/conformance tests/backends/triton tests/api/test_gpu_calls.py --ignore=$(CODEGEN_TESTS) \
	--rows triton
METAL_TESTS := tests/backends/metal tests/conformance --rows metal
DEFAULT_TESTS := tests/integrations tests/kvcache tests/api/test_groups.py tests/api/test_repeats.py
HAS_TRITON := $(BIN)/python -c 'import triton' 2>/dev/null
HAS_WGPU := $(BIN)/python -c 'import wgpu' 2>/dev/null
NO_TRITON := Triton has no build for this machine, so its kernels are not tested here

.PHONY: help demo test test-here test-cpu test-avx512 test-distributed test-triton test-codegen test-webgpu test-browser test-metal \
	test-gpu test-all mutants fuzz lint bench bench-gpu bench-webgpu bench-metal clean
.NOTPARALLEL:

help:
	@echo 'make demo      a real model with polyflash inside, a comparison with torch SDPA, and why each kernel was chosen'
	@echo 'make test      lint, then every test that takes seconds, with the next four'
	@echo 'make test-triton   the Triton kernels in the interpreter, which needs no GPU'
	@echo 'make test-codegen  what the compiler makes of them for GPUs that need not be here: spills, registers'
	@echo 'make test-webgpu   the WebGPU kernels on lavapipe and SwiftShader, drivers without a GPU (installed by root on Debian)'
	@echo 'make test-browser   the same kernels and the page of examples/web in a headless Chromium: minutes'
	@echo 'make test-metal    the Metal kernels as C++, threads as fibers: needs a C++ compiler, no Mac'
	@echo 'make test-cpu  the tests of the CPU engine alone'
	@echo 'make test-avx512  its decode kernels over codes as with AVX-512, emulated on another x86 CPU: minutes'
	@echo 'make test-distributed  one sequence over ranks: simulated ones, and processes of gloo'
	@echo 'make test-gpu  the conformance suite, the plug-ins and the cache on a GPU, DEVICE=cuda'
	@echo 'make test-all  every test, those that take minutes too'
	@echo 'make mutants   plant known mistakes in copies of the sources: does a test notice each?'
	@echo 'make fuzz      draw other problems and odd calls for MINUTES=10; what fails is stored and replayed by the tests'
	@echo 'make lint      ruff and mypy'
	@echo 'make bench     this machine against torch SDPA, into build/bench.json'
	@echo 'make bench-gpu a CUDA device against its peers in BUDGET=540 seconds, into build/gpu.jsonl and PAGE=build/gpu.md'
	@echo 'make bench-webgpu  the WebGPU kernels, variant by variant, on the adapter that is here, into build/webgpu.json'
	@echo 'make bench-metal   on a Mac: checks the Metal kernels, then measures them, into build/metal.md'
	@echo 'make clean     remove .venv and everything built'
	@echo ''
	@echo 'PYTHON=/path/to/python3.11   another interpreter than the first of python3, python3.13, 3.12, 3.11'
	@echo 'TORCH_ARGS="--index-url URL" more arguments for the pip call that installs torch, such as a CPU index'

demo: .venv/.demo
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

test: lint test-here test-triton test-codegen test-webgpu test-metal

test-here: .venv/.test
	@$(PYTEST) $(SHARED) $(ELSEWHERE) -m 'not slow and not alone'
	@$(PYTEST) $(ALONE) -m 'alone and not slow'

test-cpu: .venv/.test
	@$(PYTEST) $(SHARED) $(CPU_TESTS) -k 'not torch-forward and not torch-backward' -m 'not slow and not alone'
	@$(PYTEST) $(ALONE) -m 'alone and not slow'

test-avx512: .venv/.test
	@$(PYTEST) $(SHARED) $(wildcard tests/backends/cpu/test_decode_codes*.py) --isa avx512

test-distributed: .venv/.test
	@$(PYTEST) $(SHARED) tests/distributed

# The interpreter is chosen when triton is imported, and nothing can be compiled in its process.
test-triton: .venv/.test
	@if $(HAS_TRITON); then TRITON_INTERPRET=1 $(PYTEST) $(SHARED) $(TRITON_TESTS); else echo '$@: $(NO_TRITON)'; fi

test-codegen: .venv/.test
	@if $(HAS_TRITON); then $(PYTEST) $(LARGEST_FIRST) $(CODEGEN_TESTS); else echo '$@: $(NO_TRITON)'; fi

# SLOW= runs on lavapipe, the faster driver, the cases that take minutes too.
test-webgpu: .venv/.test
	@if ! $(HAS_WGPU); then echo '$@: wgpu has no build for this machine, so its kernels are not tested here'; exit; fi; \
	for name in lavapipe swiftshader; do \
		if [ $$name = lavapipe ]; then set -- $(SLOW); else set -- $(FOR_SWIFTSHADER); fi; \
		if driver=$$(sh scripts/drivers.sh $$name); then \
			POLYFLASH_WEBGPU_CPU=1 VK_ICD_FILENAMES=$$driver $(PYTEST) $(SHARED) $(WEBGPU_TESTS) -rs "$$@" || exit; \
		else echo "$@: the WebGPU kernels are not tested on $$name"; fi; \
	done

# The kernels as Chromium compiles them, and the page of examples/web.
test-browser: .venv/.test
	@if ! sh scripts/drivers.sh swiftshader >/dev/null; then echo '$@: nothing is tested in a browser'; exit; fi; \
	$(PYTEST) tests/browser -m '' && \
	POLYFLASH_WEBGPU_CPU=1 $(PYTEST) $(SHARED) $(WEBGPU_TESTS) --adapter chromium -rs $(WITHOUT_LONG)

test-metal: .venv/.test
	@$(PYTEST) $(SHARED) $(METAL_TESTS)

# Installs nothing, as bench-gpu below.
test-gpu:
	@python=$(BIN)/python; test -x $$python || python=$${PYTHON:-python3}; \
		PYTHONPATH=src $$python -m pytest $(GPU_TESTS) --device $(DEVICE) $(GPU_ARGS) && \
		PYTHONPATH=src $$python -m pytest $(DEFAULT_TESTS) --default-device $(DEVICE) $(GPU_ARGS) && \
		PYTHONPATH=src $$python scripts/gpu_doors.py --device $(DEVICE)

test-all: lint
	@$(PYTEST) $(SHARED) $(ELSEWHERE) -m 'not alone'
	@$(PYTEST) $(ALONE) -m alone
	@if $(HAS_TRITON); then TRITON_INTERPRET=1 $(PYTEST) $(SHARED) $(TRITON_TESTS) -m '' && \
		$(PYTEST) $(LARGEST_FIRST) $(CODEGEN_TESTS) -m ''; else echo '$@: $(NO_TRITON)'; fi
	@$(MAKE) test-avx512
	@sh scripts/naga.sh >/dev/null || true
	@sh scripts/drivers.sh spirv-cross >/dev/null || true
	@$(MAKE) test-webgpu SLOW="-m ''"
	@$(MAKE) test-browser
	@$(PYTEST) $(SHARED) $(METAL_TESTS) -m ''

mutants: .venv/.test
	@$(BIN)/python scripts/mutants.py

fuzz: .venv/.test
	@$(BIN)/python scripts/fuzz.py --minutes $(MINUTES)

lint: .venv/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: .venv/.demo
	@mkdir -p build
	@$(BIN)/polyflash bench --json build/bench.json

# Installs nothing: machines with a GPU often reach no network. Takes .venv if it is there, else PYTHON or python3.
bench-gpu:
	@python=$(BIN)/python; test -x $$python || python=$${PYTHON:-python3}; \
		PYTHONPATH=src $$python -m benchmarks.gpu --budget $(BUDGET) --json build/gpu.jsonl --page $(PAGE) $(GPU_ARGS)

bench-webgpu:
	@python=$(BIN)/python; test -x $$python || python=$${PYTHON:-python3}; \
		PYTHONPATH=src $$python -m benchmarks.webgpu --budget $(BUDGET) --json build/webgpu.json $(GPU_ARGS) && \
		PYTHONPATH=src $$python -m benchmarks.webgpu --what mappings,forward --sizes 1x8x128x64,1x8x2048x64 \
			--budget $(BUDGET) --json build/ladder.json

bench-metal: .venv/.demo
	@$(BIN)/python scripts/metal_check.py $(GPU_ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.torch: constraints.txt scripts/setup.sh
	@$(SETUP) torch
	@touch $@

.venv/.demo: .venv/.torch pyproject.toml
	@$(SETUP) demo
	@touch $@

.venv/.test: .venv/.demo
	@$(SETUP) test
	@touch $@
