# Everything from nothing: each target makes the virtual environment it needs. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(RUN) tools/train.py --config configs/digits.yaml --overwrite

test: $(INSTALLED)
	.ci/chromium
	$(RUN) -m pytest -q

lint: $(INSTALLED)
	$(RUN) -m ruff check .

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "visionattn needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
