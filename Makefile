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
# pytest; pytest-xdist is used where it is there, since compiling takes most of the time). The second runs whatever the first says.
gpu: PARALLEL = $(shell $(PYTHON) -c 'import importlib.util as i; print("-n 8" if i.find_spec("xdist") else "")')
gpu: export PYTHONPATH := .$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: no GPU here that PyTorch can use")'
	status=0; \
	$(PYTHON) -m pytest -q $(PARALLEL) -m gpu $(wildcard tests/test_kernels_*.py tests/test_triton_*.py) || status=$$?; \
	$(PYTHON) tools/benchmark.py --gpu || status=$$?; \
	exit $$status

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "visionattn needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
