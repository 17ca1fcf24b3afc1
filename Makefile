# Everything from nothing: each target makes the virtual environment it needs. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint gpu clean

demo: $(INSTALLED)
	$(RUN) tools/train.py --config configs/digits.yaml --overwrite

test: $(INSTALLED)
	.ci/chromium
	$(RUN) -m pytest -q

lint: $(INSTALLED)
	$(RUN) -m ruff check .

# On a machine with an NVIDIA GPU: checks the kernels, then measures them, with what is installed (torch, triton, timm, einops,
# pytest; pytest-xdist is used where it is there, since compiling takes most of the time), in less than 8 minutes. In seconds after
# the start: the tests are ended at the first, the table begins no row after the second and is ended at the third. That leaves it
# 4.5 minutes at least; rows that are not reached say so. The table is printed whatever the tests say.
GPU_SECONDS = 170 440 475
gpu: PARALLEL = $(shell $(PYTHON) -c 'import importlib.util as i; print("-n 8" if i.find_spec("xdist") else "")')
gpu: LEFT = $$(( begun - $$(date +%s) + $(1) ))
gpu: ENDING = timeout --foreground --signal=INT --kill-after=15
gpu: export PYTHONPATH := .$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: no GPU here that PyTorch can use")'
	begun=$$(date +%s); status=0; \
	$(ENDING) $(word 1,$(GPU_SECONDS)) \
	  $(PYTHON) -m pytest -q $(PARALLEL) -m gpu $(wildcard tests/test_kernels_*.py tests/test_triton_*.py) || status=$$?; \
	case $$status in 124 | 137) echo "tests were ended after $(word 1,$(GPU_SECONDS)) s; what they did not reach is not checked";; esac; \
	minutes=$$($(PYTHON) -c "print($(call LEFT,$(word 2,$(GPU_SECONDS))) / 60)"); \
	$(ENDING) $(call LEFT,$(word 3,$(GPU_SECONDS))) $(PYTHON) tools/benchmark.py --gpu --minutes $$minutes || status=$$?; \
	exit $$status

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "visionattn needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
