# `make` lists the targets. `make demo` and `make test` are the two to begin
# with: each installs the Debian packages it lacks (deps.txt) when run as root.
SHELL   := /bin/bash
GO      ?= go
VERSION ?= 0.1.0-dev
BIN     := bin/penstock
LDFLAGS := -s -w -X main.version=$(VERSION)

# One setting for building, testing and linting, so that all share one cache.
export CGO_ENABLED := 0

# Only make test tests a program that is there already: the one it has built.
unexport PENSTOCK_BINARY

# Rounds and lengths of the long tests; soak raises them.
SOAK_ROUNDS ?= 100
MINUTES     ?= 10
NODES       ?= 40
VOLUMES     ?= 100
FUZZTIME    ?= 10s

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: deps
deps: ## install the Debian packages that are missing (deps.txt)
	@scripts/deps.sh

.PHONY: build
build: ## build the static binary bin/penstock
	$(GO) build -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/penstock

.PHONY: demo
demo: deps build ## bring the system up, run the main job, kill it, verify, clean up
	$(BIN) demo

.PHONY: test
test: deps build ## run the whole test suite and the linters (root and /dev/fuse needed)
	@[ "$$(id -u)" = 0 ] || { echo "make test: run as root: the tests mount file systems" >&2; exit 1; }
	@[ -c /dev/fuse ] || { echo "make test: /dev/fuse is missing: modprobe fuse" >&2; exit 1; }
	GO=$(GO) PENSTOCK_BINARY=$(abspath $(BIN)) $(GO) run ./test/verdict -p 2 -timeout 25m ./...
	@$(MAKE) --no-print-directory check

.PHONY: check
check: ## vet and lint
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "gofmt needed: $$out (make fix)" >&2; exit 1; }
	$(GO) vet ./...
	$(GO) tool staticcheck ./...

.PHONY: race
race: deps ## run the tests of every package with the race detector
	CGO_ENABLED=1 $(GO) test -race -count 1 -p 2 -timeout 40m ./...

.PHONY: fuzz
fuzz: ## run every fuzz test for FUZZTIME (10s)
	GO='$(GO)' scripts/fuzz.sh $(FUZZTIME)

.PHONY: bench
bench: build ## run the benchmark on a fresh `penstock up` beside the native file system
	BIN=$(abspath $(BIN)) scripts/bench.sh $(BENCHFLAGS)

.PHONY: bench-fio
bench-fio: deps build ## four rows of the benchmark beside fio on the same directory
	$(BIN) bench-fio $${DIR:-/var/tmp}

.PHONY: bench-streams
bench-streams: build ## streams of `penstock up` beside kfake (franz-go) and nats-server's JetStream: speed, processor time, latency (BENCHFLAGS); then the memory of 10,000 idle streams
	cd test/clients/bench && $(GO) run . -penstock $(abspath $(BIN)) $(BENCHFLAGS)
	cd test/clients/bench && $(GO) run . -penstock $(abspath $(BIN)) -idle 10000

.PHONY: soak
soak: soak-snapshots soak-mirrors soak-cluster soak-streams soak-crash ## all parts of the soak: 200 snapshots, 30 kills of mirrors, MINUTES (10) of a cluster under faults, MINUTES of streams, SOAK_ROUNDS (100) rounds on one machine

.PHONY: soak-snapshots
soak-snapshots: deps ## 200 snapshots of a volume that changes, deleted in any order, checked against a model, and 200 while two mounts write
	$(GO) test -timeout 20m -count 1 -v ./meta/namespace -run '^TestManySnapshots$$' -snapshots 200 -snapshots-seed $$(date +%s)
	$(GO) test -timeout 20m -count 1 ./meta/namespace -run '^TestHeldIsExact$$' -held 100
	$(GO) test -timeout 20m -count 1 -v ./test/indexes -run '^TestAtomicOverMounts$$' -snapshots 200

.PHONY: soak-mirrors
soak-mirrors: deps ## mirrors of random trees: a side killed 30 times while they copy, readers and copiers stopped, other changes each time
	$(GO) test -timeout 1h -count 1 -v ./test/mirror -kills 30 -size 1024 -seed $$(date +%s)

.PHONY: soak-cluster
soak-cluster: deps ## a cluster in network namespaces under a mixed load and one fault each 5 s, for MINUTES (10)
	$(GO) test -timeout $$(( $(MINUTES) + 20 ))m -count 1 -v ./test/cluster -run '^TestSoak$$' -soak $(MINUTES)m -copies -seed 0

.PHONY: soak-streams
soak-streams: deps ## producers and consumers of streams on a cluster with gateways under one fault each 5 s, for MINUTES (10)
	$(GO) test -timeout $$(( $(MINUTES) + 20 ))m -count 1 -v ./test/cluster -run '^TestStreamSoak$$' -streams $(MINUTES)m -seed 0

.PHONY: soak-crash
soak-crash: deps build ## kills, power cuts, full and failing disks for SOAK_ROUNDS (100) rounds
	$(GO) test -timeout 12h -count 1 -v ./test/crash -rounds $(SOAK_ROUNDS)

.PHONY: controls
controls: deps build ## switch each safety mechanism off; the test that guards it must fail
	$(GO) test -timeout 1h -count 1 -v ./test/crash -run 'Controls$$' -controls
	$(GO) test -timeout 90m -count 1 -v ./test/cluster -run '^TestSoakControls$$' -soak 5m -seed 0 -controls
	$(GO) test -timeout 90m -count 1 -v ./test/cluster -run '^TestStreamSoakControls$$' -every 3s -seed 0 -controls

.PHONY: burst
burst: deps ## NODES (40) nodes with node agents join within a minute, pods there use a claim of 100,000 files, and they go, ten by a loss of power
	$(GO) test -timeout 30m -count 1 -v ./test/cluster -run '^TestBurst$$' -burst $(NODES) -burst-within 60s -burst-files 100000

.PHONY: many-volumes
many-volumes: deps ## a node with VOLUMES (100) volumes loses its agent and all mounts at once: each pod's pause
	$(GO) test -timeout 30m -count 1 -v ./test/csi -run '^TestManyVolumes$$' -volumes $(VOLUMES)

.PHONY: chart
chart: ## have helm itself render, judge and refuse what the charts make of values, and kustomize the plain manifests (builds both)
	cd test/helm && $(GO) test -count 1 ./...

.PHONY: e2e-tables
e2e-tables: deps ## ClickHouse, DuckDB and hyparquet read the published table of a stream (needs Node.js; 600 MB of npm's packages)
	cd test/streams/readers && npm install --no-audit --no-fund
	$(GO) test -timeout 15m -count 1 -v ./test/streams -run '^TestTable$$' -readers $(CURDIR)/test/streams/readers

.PHONY: e2e-streams
e2e-streams: deps build ## Kafka clients in Go, Python, Node.js and C use the streams of a `penstock up`; PyTorch trains from a stream; prints a table (needs Node.js)
	@DEPS=test/clients/deps.txt scripts/deps.sh
	cd test/clients/scripts && npm install --no-audit --no-fund
	cd test/clients && $(GO) test -timeout 20m -count 1 -v -skip '^TestKgo$$' . -program $(abspath $(BIN))

.PHONY: e2e-kgo
e2e-kgo: deps build ## franz-go's own tests use the streams of a `penstock up`, of three gateways, and over connections that break
	cd test/clients && $(GO) test -timeout 30m -count 1 -v -run '^TestKgo$$' . -program $(abspath $(BIN))

.PHONY: e2e-k8s
e2e-k8s: deps ## a Kubernetes of two nodes on this machine, Penstock deployed in it, and what users do there (root; E2EFLAGS)
	@DEPS=test/k8s/deps.txt scripts/deps.sh
	cd test/k8s && $(GO) test -count 1 -v -timeout 90m ./stories $(E2EFLAGS)

.PHONY: e2e-k8s-training
e2e-k8s-training: deps ## there, PyTorch trains on a claim, on a snapshot and on the node's own disk by turns: who is how fast (some 25 minutes, 255 MB of Debian's packages; E2EFLAGS)
	@DEPS=test/k8s/deps.txt scripts/deps.sh
	cd test/k8s && $(GO) test -count 1 -v -timeout 3h ./stories -run '^TestTraining$$' $(E2EFLAGS)

.PHONY: e2e-k8s-storage
e2e-k8s-storage: deps ## there, Kubernetes' own tests of storage drivers (hours on a busy machine; E2EFLAGS)
	@DEPS=test/k8s/deps.txt scripts/deps.sh
	cd test/k8s && $(GO) test -count 1 -v -timeout 4h ./stories -run '^TestStorageSuite$$' $(E2EFLAGS)

.PHONY: gen
gen: ## regenerate what is generated
	$(GO) generate ./...

.PHONY: proto
proto: ## regenerate the Go files of the administrative API and of Append from their .proto files
	$(GO) generate ./meta/admin ./stream/ingest

.PHONY: fix
fix: ## format and modernise the sources
	gofmt -w $$(git ls-files '*.go')
	$(GO) fix ./...
