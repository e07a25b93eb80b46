PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
# No hub is asked unless you say so: `make finetune HF_HUB_OFFLINE=0`.
export HF_HUB_OFFLINE ?= 1

.PHONY: help finetune test lint upgrade
help:
	@echo "make finetune   install into $(VENV) and run the whole pipeline on the embedded example (CPU, no hub)"
	@echo "make test       install into $(VENV) and run the tests"
	@echo "make lint       check style and formatting"
	@echo "make upgrade    install the newest allowed versions, pin them in constraints.txt, run the tests"

finetune: $(INSTALLED)
	@echo "Fine-tuning the embedded example; everything is written below $${FINETUNE_STORAGE_ROOT:-~/.finetune}."
	@$(VENV)/bin/python -m flows.finetune smoke

test: $(INSTALLED)
	@echo "Running the tests: a real Prefect server and worker, a real MLflow server, a tiny model. A few minutes."
	@$(VENV)/bin/python -m pytest

lint: $(INSTALLED)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

upgrade:
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install '.[dev]'
	{ sed -n '/^#/p' constraints.txt; $(VENV)/bin/pip freeze --exclude finetune | sed '/^nvidia-\(ml-py\)\@!/d; s/+c[pu][u0-9]*$$//'; } > constraints.new
	mv constraints.new constraints.txt
	touch $(INSTALLED)
	$(MAKE) test

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): once, a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt '.[dev]'
	@rm -rf build finetune.egg-info
	@touch $@
