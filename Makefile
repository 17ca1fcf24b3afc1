# Everything from nothing: each target makes the virtual environment it needs. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all lint docs gpu gpu-rehearsal clean

demo: $(INSTALLED)
	$(RUN) tools/train.py --config configs/digits.yaml --overwrite

# In as many processes as there are cores; ARGS="tests/ops -k causal" runs some of the tests. test-all adds the slow ones.
test test-all: $(INSTALLED)
	$(if $(filter test-all,$@),.ci/chromium)
	$(RUN) -m pytest -q -n auto --dist worksteal --durations 10 $(if $(filter test-all,$@),-m "slow or not slow") $(ARGS)

lint: $(INSTALLED)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy visionattn

# The API reference, from docstrings: build/api/index.html.
docs: $(INSTALLED)
	$(RUN) docs/api_reference.py build/api

# On a machine with an NVIDIA GPU: checks the kernels, then measures them, in less than ten minutes, with what is installed there
# (torch, triton, timm, einops, pytest). Everything is written to the folder OUT as it comes; the last lines are the summary.
# ONLY names rows. gpu-rehearsal runs the same lines without a GPU: tiny sizes, Triton's interpreter.
gpu: OUT ?= gpu-$(shell date +%Y%m%d-%H%M%S)
gpu-rehearsal: OUT ?= $(shell mktemp -d)
gpu gpu-rehearsal: export PYTHONPATH := .$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu:
	@$(PYTHON) -u -m visionattn.lab.gpu.gpu_phases $(OUT) $(if $(ONLY),--only "$(ONLY)")
gpu-rehearsal: $(INSTALLED)
	@$(RUN) -u -m visionattn.lab.gpu.gpu_phases $(OUT) --rehearse $(if $(ONLY),--only "$(ONLY)")

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "visionattn needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@echo "installing into $(VENV): some gigabytes, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
