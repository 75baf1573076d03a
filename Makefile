# make demo and make test work on a fresh clone; the first call installs into .venv, later ones don't.
PYTHON ?= python3
STAMP := .venv/.installed

.PHONY: demo test lint types clean help

help:
	@echo "make demo   train handwritten digits block by block and end to end, and compare (QUICK=1: 20 updates)"
	@echo "make test   the test suite"
	@echo "make lint   ruff;  make types   mypy;  make clean   removes .venv and runs"

demo: $(STAMP)
	.venv/bin/diffusionblocks compare vit-digits --out runs/demo$(if $(QUICK),-quick --quick) $(ARGS)

test: $(STAMP)
	.venv/bin/python -m pytest $(ARGS)

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: $(STAMP)
	.venv/bin/mypy

# The stamp is touched last: an install that failed half-way is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv runs
