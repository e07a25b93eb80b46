PYTHON ?= python3
VENV := .venv
TRIAL := .venv-upgrade
INSTALLED := $(VENV)/.installed
# No hub is asked unless you say so: `make finetune HF_HUB_OFFLINE=0`.
export HF_HUB_OFFLINE ?= 1

.PHONY: help finetune test lint upgrade
help:
	@echo "make finetune   install into $(VENV) and run the whole pipeline on the embedded example (CPU, no hub)"
	@echo "make test       install into $(VENV) and run the tests"
	@echo "make lint       check style and formatting"
	@echo "make upgrade    try the newest allowed versions; pin them in constraints.txt if lint and tests pass"

finetune: $(INSTALLED)
	@echo "Fine-tuning the embedded example; everything is written below $${FINETUNE_STORAGE_ROOT:-~/.finetune}."
	@$(VENV)/bin/python -m flows.finetune smoke

test: $(INSTALLED)
	@echo "Running the tests: a real Prefect server and worker, a real MLflow server, a tiny model. A few minutes."
	@$(VENV)/bin/python -m pytest

lint: $(INSTALLED)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

# Beside $(VENV), which stays as it is. torch stays at its pin: drivers and GPUs depend on it, so raise it by hand.
upgrade:
	$(PYTHON) -m venv --clear $(TRIAL)
	$(TRIAL)/bin/pip install --quiet --disable-pip-version-check '.[dev]' "$$(grep '^torch==' constraints.txt)"
	cp constraints.txt constraints.old
	{ sed -n '/^#/p' constraints.old; $(TRIAL)/bin/pip freeze --exclude finetune | sed '/^nvidia-ml-py=/b; /^nvidia-/d; s/+c[pu][u0-9]*$$//'; } > constraints.txt
	touch $(TRIAL)/.installed
	@diff -U 0 constraints.old constraints.txt || true
	@$(MAKE) VENV=$(TRIAL) lint test || { mv constraints.old constraints.txt; \
		echo "The checks fail with these versions: constraints.txt is as it was. $(TRIAL) has them, to look into."; exit 1; }
	@rm -rf $(TRIAL) constraints.old build finetune.egg-info
	@echo "The checks pass: constraints.txt has these versions, and the next make installs them."

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): once, a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt '.[dev]'
	@rm -rf build finetune.egg-info
	@touch $@
