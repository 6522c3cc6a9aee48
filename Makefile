# Each target works from a fresh clone: the first run makes .venv, later ones start at once. Native code is built again
# when it changes; Python code is live (an editable install). ARGS are passed on, as in: make test ARGS='-k plan -x'
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
NATIVE := setup.py pyproject.toml constraints.txt $(shell find csrc -type f)

.PHONY: test bench lint stubs clean

test: .venv/installed  ## the default suite; ARGS='-m slow' runs the slow one
	$(BIN)/pytest $(ARGS)

bench: .venv/installed
	$(BIN)/moonep bench $(ARGS)

lint: .venv/installed-lint  ## style, spelling, types, and that moonep/_C.pyi is what the built module says
	PATH="$(CURDIR)/$(BIN):$$PATH" pre-commit run --all-files --show-diff-on-failure
	$(BIN)/mypy
	$(BIN)/python -m nanobind.stubgen -q -m moonep._C -o .venv/_C.pyi
	diff -u moonep/_C.pyi .venv/_C.pyi

stubs: .venv/installed-lint
	$(BIN)/python -m nanobind.stubgen -q -m moonep._C -o moonep/_C.pyi

clean:
	rm -rf .venv build dist *.egg-info moonep/*.so

.venv/installed: $(NATIVE) | $(BIN)/python
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

.venv/installed-lint: .venv/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[test,lint]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
