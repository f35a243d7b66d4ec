# Two doors: `make report` tests this machine, `make test` tests this project.
# Each works on a fresh clone with python >= 3.11, venv and make.

PYTHON ?=
BOOTSTRAP ?= python3
VENV ?= .venv
TEST_VENV ?= .venv-test
REPORT_DIR ?= reports
ARGS ?=

.PHONY: report test check clean

# Without PYTHON: a virtual environment with the tested stack, its torch chosen for the driver.
# With PYTHON=…/bin/python: that environment is tested as it is, and nothing is installed.
report:
ifeq ($(PYTHON),)
	$(BOOTSTRAP) scripts/build_stack.py --venv $(VENV)
	CIFT_STACK_ORIGIN="built by make report" $(VENV)/bin/python -m cift_probe run --report-dir $(REPORT_DIR) $(ARGS)
else
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m cift_probe run --report-dir $(REPORT_DIR) $(ARGS)
endif

test:
	$(BOOTSTRAP) scripts/build_stack.py --venv $(TEST_VENV) --cpu --dev
	$(TEST_VENV)/bin/python -m ruff check
	$(TEST_VENV)/bin/python -m ruff format --check
	$(TEST_VENV)/bin/python -m mypy
	$(TEST_VENV)/bin/lint-imports
	$(TEST_VENV)/bin/python -m pytest tests -n auto --dist loadfile

clean:
	rm -rf $(VENV) $(TEST_VENV) .ruff_cache .mypy_cache .import_linter_cache .pytest_cache build *.egg-info
