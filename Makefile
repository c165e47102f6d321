# make demo | test | test-slow | bench | clean. Needs python3 (with venv), g++ and make; everything else goes into $(VENV).
PYTHON ?= python3
VENV   ?= .venv
MINUTES ?= 3
PY      = $(abspath $(VENV))/bin/python
PIP     = $(PY) -m pip install -q -c constraints.txt

.PHONY: demo test test-slow lint types bench clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Editable installs, so that a later edit needs no new install; the stamps only note which extras are there.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[examples]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[test]'
	touch $@

demo: $(VENV)/.demo
	$(PY) examples/train_gpt.py --minutes $(MINUTES)

lint: $(VENV)/.test
	$(PY) -m ruff check .

# The mapped folders (passes/, runtime/) are visible to a type checker only in an installed package, so the wheel is what
# is checked. build/ is removed first: setuptools would put a deleted module's old copy into the wheel.
types: $(VENV)/.test
	rm -rf build
	$(PY) -m pip wheel -q --no-deps -w build/wheel .
	$(PY) -m pip install -q --no-deps --target build/typed build/wheel/*.whl
	cd build/typed && $(PY) -m mypy --config-file ../../pyproject.toml -p zinf_compile
	rm -rf build

test: lint types
	$(PY) -m pytest -p no:cacheprovider -o log_level=WARNING -o faulthandler_timeout=300

test-slow: $(VENV)/.test
	$(PY) -m pytest -p no:cacheprovider -o log_level=WARNING -o faulthandler_timeout=600 -m slow

# Every measurement prints its own table; nothing is asserted.
bench: $(VENV)/.test
	$(PY) tests/bench/train_gpt2.py --engine eager --steps 5
	$(PY) tests/bench/train_gpt2.py --engine zinf --steps 5
	$(PY) tests/bench/pairs.py --rounds 10 --a "--engine aot" --b "--engine zinf"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
