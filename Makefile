# make train: install, train, generate.  make test: every check in minutes; make test-slow: the long ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install setup lock train test test-slow test-install test-lowest test-newest test-next lint typecheck imports unit site \
	clean

install: $(VENV)/.package
setup: $(VENV)/.dev

# Only the package, which is what training and generating need. Runs again when the dependencies change.
$(VENV)/.package: pyproject.toml constraints.txt lock.txt scripts/install.py
	$(PYTHON) scripts/install.py $(VENV)
	touch $@

# The package and the tools of its tests.
$(VENV)/.dev: pyproject.toml constraints.txt lock.txt scripts/install.py
	$(PYTHON) scripts/install.py $(VENV) --extras dev
	touch $@ $(VENV)/.package

# Writes lock.txt again, after a change of constraints.txt or of a requirement. Needs uv.
lock:
	$(PYTHON) scripts/lock.py

train: install
	$(BIN)/gpt fit --minutes 1.8
	$(BIN)/gpt generate --prompt 'Return the' --num_samples 2 --seed 1 --max_new_tokens 60

test: lint typecheck imports unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/words.py

typecheck: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

# Two processes of one thread each: more threads do not speed up tiny models. tests/conftest.py orders them.
PYTEST := OMP_NUM_THREADS=1 PYTHONWARNDEFAULTENCODING=1 $(BIN)/python -m pytest \
	-n 2 --no-loadscope-reorder --durations 25

unit: setup
	$(PYTEST) -m 'not slow'

# Whole programs: fault injection, documents, scripts, a browser, two processes in all forms.
test-slow: setup
	$(PYTEST) -m slow --timeout 900

# Minutes, and a package index: apart from the tests, which need no network.
test-install:
	$(PYTHON) scripts/check_install.py

# A part of the tests with the lowest and the newest versions that pyproject.toml allows, and with the next ones, above its
# ceilings. Warnings are those of the versions. Needs uv.
PART := tests/attention tests/test_model.py tests/test_cli.py tests/text/test_template.py tests/run/test_fit.py \
	tests/run/test_tuning.py tests/generation/test_write.py tests/serve/test_app.py tests/serve/test_chat.py \
	tests/weights/test_hf.py
test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-next: RESOLUTION := highest --override $(VENV)-test-next/any.txt
test-lowest test-newest test-next:
	uv venv --clear --python $(PYTHON) $(VENV)-$@
	printf 'torch\nlightning\nuvicorn\n' > $(VENV)-$@/any.txt
	uv pip install --python $(VENV)-$@/bin/python --resolution $(RESOLUTION) --editable '.[dev]'
	OMP_NUM_THREADS=1 $(VENV)-$@/bin/python -m pytest -W default $(PART)

# The documents as a site, with the Python interface from the docstrings: docs/_build/index.html.
site:
	$(PYTHON) scripts/install.py $(VENV) --extras dev,docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

clean:
	rm -rf docs/_build $(VENV) $(VENV)-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
