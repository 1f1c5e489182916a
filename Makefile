# "make demo" and "make test" do their own setup on a Debian with Go, as root. See README.md and
# CONTRIBUTING.md.
SHELL   := /bin/bash
GO      ?= go
PREFIX  ?= /usr
# Debian packages for "make test": a second NFS server, an independent decoder, programs that work
# on a mount, libraries for another client, a Prometheus, a terminal, and a browser.
DEBS    := nfs-ganesha nfs-ganesha-vfs rpcbind nfs-common tshark fuse3 acl rsync git systemd dbus-daemon procps iproute2 \
           libibverbs-dev librdmacm-dev gcc libc6-dev libnfs-dev libfuse3-dev prometheus tmux chromium \
           man-db mandoc rpm
# Programs for "make test-programs".
PROGRAMS := postgresql postgresql-contrib sqlite3 dbench stress-ng fio rsync tar git
FUZZTIME ?= 60s
LINT    := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GREMLINS := github.com/go-gremlins/gremlins/cmd/gremlins@v0.6.0
# Percent of the mutants that the tests of a package must kill.
EFFICACY := 85
NFPM_VERSION := v2.45.2
# Built once: "go run" with a version needs the network each time, and tests have none.
NFPM    := bin/nfpm-$(NFPM_VERSION)
# Tests that cannot run under the race detector: they count allocations, or start thousands of
# goroutines with a fake clock.
NORACE_TESTS := TestCallsDoNotAllocate TestRequestsDoNotAllocate TestMountedCallsDoNotAllocate \
                TestGuestRequestsDoNotAllocate TestFleet
# Modules for themselves, because only their tests need csi-sanity or a browser.
TEST_MODULES := test/kubernetes test/monitoring
# The rdma-core provider needs a C compiler and the headers of rdma-core. The program opens the
# libraries at run time, so it also runs on hosts without them.
RDMACORE := $(if $(and $(wildcard /usr/include/rdma/rdma_cma.h),$(shell command -v $${CC:-gcc})),-tags rdmacore)
# Go takes the version that "nfsrdmad version" prints from the newest tag.
VERSION  = $(shell git describe --tags --always --dirty)
DIST     = dist
BIN     ?= bin
# The time of the commit, for packages.
COMMIT_TIME = $(shell git log -1 --format=%ct)

.PHONY: build check demo test test-chart test-programs lab test-lab test-lab-all test-lab-smoke bench bench-go scale panels soak fuzz mutants lint \
        deps debs modules install release manual reference deb rpm image clean

build:
	CGO_ENABLED=$(if $(RDMACORE),1,0) $(GO) build $(RDMACORE) -buildvcs=auto -trimpath -o $(BIN)/nfsrdmad ./cmd/nfsrdmad

# Unit tests: need Go and nothing else.
check:
	NFSRDMAD_LAB=0 $(GO) test -short -timeout 5m ./...

# Mount from the embedded server. Needs Go, root and /dev/fuse.
demo: build
	bin/nfsrdmad demo

test-programs: DEBS += $(PROGRAMS)

# Packages, modules and tools at the same time: one waits for the network, another for a processor.
deps:
	@$(MAKE) --no-print-directory -j3 debs modules $(NFPM) DEBS="$(DEBS)"

debs:
	@missing=; for p in $(DEBS); do \
	  dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q '^install ok installed' || missing="$$missing $$p"; \
	done; \
	if [ -n "$$missing" ]; then echo "installing$$missing"; \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi

modules:
	@$(GO) mod download # tests build the program, and test/isolate has no network
	@for m in $(TEST_MODULES); do cd $(CURDIR)/$$m && $(GO) mod download || exit; done

# Each package runs in namespaces of its own, so that packages can run at the same time, and no
# process outlives its test. Those that take longest start first. The timeouts are for one package:
# two to three times what the slowest one needs on an idle machine with two processors. A package
# waits at times, so there is one more than processors. "make lint" runs vet.
test: deps
	NFSRDMAD_LAB=0 $(GO) test -race -vet=off -p $$(($$(nproc) + 1)) \
	  $$(test -e /usr/include/rdma/rdma_cma.h && echo -tags rdmacore) \
	  -exec $(CURDIR)/test/isolate -timeout 20m ./test/integration ./pkg/vfs ./test/packages ./cmd/nfsrdmad ./...
	# The programs run in other processes, so the race detector would see the tests only.
	for m in $(TEST_MODULES); do cd $(CURDIR)/$$m && NFSRDMAD_LAB=0 $(GO) test -vet=off -exec $(CURDIR)/test/isolate \
	  -timeout 10m ./... || exit; done
	# Not possible under the race detector.
	out=$$(NFSRDMAD_LAB=0 $(GO) test -v -run 'DoNotAllocate$$|^TestFleet$$' -exec $(CURDIR)/test/isolate \
	  ./pkg/nfs/nfs3 ./pkg/fuse/kernel ./pkg/vfs ./pkg/fuse/virtiofs ./pkg/xprt); echo "$$out"; \
	  for t in $(NORACE_TESTS); do grep -q "^--- PASS: $$t " <<< "$$out" || { echo "$$t did not pass"; exit 1; }; done

# The Helm chart and the manifests of deploy/kubernetes. Helm takes two minutes to compile.
test-chart:
	cd test/chart && $(GO) test ./...

# Real programs on mounts, with their own checks. Takes about an hour.
test-programs: deps
	NFSRDMAD_PROGRAMS=1 $(GO) test -v -count 1 -exec $(CURDIR)/test/isolate -timeout 3h ./test/programs

# Build the virtual machines from Debian packages. See test/lab/README.md.
lab:
	test/lab/image/build.sh

# One guest: mount its export over siw, copy a source tree in and out, compare.
test-lab-smoke: deps
	test/lab/image/build.sh 6.12
	out=$$(NFSRDMAD_LAB=1 $(GO) test -v -count 1 -exec $(CURDIR)/test/isolate -timeout 10m \
	  -run '^TestServers$$/softiwarp$$/^main_job$$' ./test/lab/knfsd 2>&1) || { echo "$$out"; exit 1; }; echo "$$out"; \
	  grep -q -- '--- PASS: .*/main_job' <<< "$$out" || { echo "main_job did not pass"; exit 1; }

# Test against stock Linux servers on the newest kernel. The log has the measured figures.
test-lab: deps lab
	NFSRDMAD_LAB=1 $(GO) test -v -p 2 -count 1 -exec $(CURDIR)/test/isolate -timeout 45m ./test/lab/...

# Test against every kernel and device. This takes hours.
test-lab-all: deps lab
	NFSRDMAD_LAB=all $(GO) test -v -p 1 -count 1 -exec $(CURDIR)/test/isolate -timeout 6h ./test/lab/...

# Compare mounts with yardsticks on this machine, in a few minutes. See test/bench.
bench: build deps
	NFSRDMAD_PROGRAM=$(CURDIR)/bin/nfsrdmad $(GO) test -v -count 1 -run '^TestBench$$' -exec $(CURDIR)/test/isolate \
	  -timeout 15m ./test/bench -full -out $(CURDIR)/bin/bench/results

# What mounts and connections cost, and what happens when a server with thousands of clients
# restarts. Writes docs/scale.md in about 15 minutes. See test/scale.
scale: build deps
	mkdir -p bin/scale
	$(GO) test -count 1 -run '^TestFleet$$' ./pkg/xprt -fleet $(CURDIR)/bin/scale/fleet.json
	NFSRDMAD_PROGRAM=$(CURDIR)/bin/nfsrdmad $(GO) test -v -count 1 -run '^TestScale$$' -exec $(CURDIR)/test/isolate \
	  -timeout 30m ./test/scale -full -out $(CURDIR)/bin/scale/scale.json
	$(GO) test -count 1 -run '^TestPage$$' ./test/scale -update -results $(CURDIR)/bin/scale

# Draw what the dashboard for Grafana shows of a daemon under load and faults. Writes
# docs/dashboard-*.png in six minutes. See test/monitoring.
panels: deps
	cd test/monitoring && $(GO) test -v -count 1 -run '^TestPanels$$' -exec $(CURDIR)/test/isolate -timeout 15m . \
	  -panels $(CURDIR)/docs

# The benchmarks of the packages. Compare figures of one run only.
bench-go:
	$(GO) test -run '^$$' -bench . -benchmem ./...

# 10,000 disconnects under verified I/O, random operations compared with a local directory, thousands
# of readers beside another user, power failures of three servers, restarts of the daemon under load,
# and real programs. "make test" and "make test-lab" run short forms of all but the last.
soak: test-programs lab
	NFSRDMAD_STORM=10000 NFSRDMAD_VERIFY=all $(GO) test -run TestStorm -v -count 1 -timeout 3h ./test/integration
	NFSRDMAD_DIFFERENTIAL=15m $(GO) test -run '^TestDifferential$$' -v -count 1 -timeout 2h ./test/integration
	NFSRDMAD_LOCK_ROUNDS=12000 $(GO) test -run '^TestLocksExclude' -v -count 1 -exec $(CURDIR)/test/isolate -timeout 2h \
	  ./test/integration ./test/restart
	NFSRDMAD_FLOOD=10s $(GO) test -run '^TestFlood$$' -v -count 1 -timeout 1h ./test/integration
	NFSRDMAD_LOCK_ROUNDS=2000 $(GO) test -run '^TestNoRequestSleepsWithoutCause$$' -v -count 1 -timeout 1h ./pkg/nfs/nlm
	NFSRDMAD_POWER=400 $(GO) test -run '^(TestPowerFailure|TestPowerDaemon)$$' -v -count 1 -timeout 6h \
	  ./test/integration
	NFSRDMAD_LAB=1 NFSRDMAD_RESTARTS=20 $(GO) test -v -count 1 -exec $(CURDIR)/test/isolate -timeout 2h ./test/restart
	NFSRDMAD_VIRTIOFS_KILLS=2000 $(GO) test -run '^TestKillAtSteps$$' -v -count 1 -exec $(CURDIR)/test/isolate -timeout 2h ./pkg/fuse/virtiofs
	NFSRDMAD_LAB=1 NFSRDMAD_POWER=200 $(GO) test -run '^TestServers$$/softiwarp$$/^power_failures$$' -v -timeout 6h \
	  -exec $(CURDIR)/test/isolate ./test/lab/knfsd

fuzz:
	@set -e; for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	    echo "== $$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p; \
	  done; done

# Check that tests fail when the code is wrong: patches for each row of docs/features.md, and every
# operator that gremlins can change in the codecs and in memory registration. Takes hours.
mutants:
	NFSRDMAD_MUTANTS=1 $(GO) test -count 1 -timeout 3h ./test/mutants
	@set -e; for p in pkg/rpcrdma pkg/sunrpc pkg/memreg; do \
	  $(GO) run $(GREMLINS) unleash --threshold-efficacy $(EFFICACY) --timeout-coefficient 10 ./$$p; \
	done

lint:
	$(GO) run $(LINT) run ./...
	$(GO) run $(LINT) run --build-tags manual ./cmd/...
	for m in $(TEST_MODULES) test/chart; do cd $(CURDIR)/$$m && $(GO) run $(LINT) run ./... || exit; done
	$(if $(RDMACORE),$(GO) run $(LINT) run --build-tags rdmacore ./pkg/verbs/... ./pkg/mount/... ./cmd/...)

# Binaries with checksums in $(DIST): static ones, and one with the rdma-core provider where its
# headers are installed.
release:
	rm -rf $(DIST)
	@set -e; for arch in amd64 arm64; do \
	  d=$(DIST)/nfsrdmad-$(VERSION)-linux-$$arch; mkdir -p $$d; \
	  CGO_ENABLED=0 GOARCH=$$arch $(GO) build -buildvcs=true -trimpath -ldflags '-s -w' -o $$d/nfsrdmad ./cmd/nfsrdmad; \
	done
	@set -e; if [ -n "$(RDMACORE)" ]; then \
	  d=$(DIST)/nfsrdmad-$(VERSION)-linux-$$($(GO) env GOARCH)-rdmacore; mkdir -p $$d; \
	  CGO_ENABLED=1 $(GO) build $(RDMACORE) -buildvcs=true -trimpath -ldflags '-s -w' -o $$d/nfsrdmad ./cmd/nfsrdmad; \
	fi
	@set -e; cd $(DIST); for d in nfsrdmad-*; do \
	  cp ../LICENSE ../README.md ../CHANGELOG.md ../configs/nfsrdmad.toml ../deploy/systemd/nfsrdmad.service \
	    ../deploy/prometheus/nfsrdmad.rules.yml ../deploy/grafana/nfsrdmad.json $$d/; \
	  tar --sort=name --owner=0 --group=0 --mtime="@$$(git log -1 --format=%ct)" -czf $$d.tar.gz $$d; rm -r $$d; \
	done; sha256sum *.tar.gz > SHA256SUMS; cat SHA256SUMS

# Man pages and shell completions, in the layout of /usr/share.
manual:
	rm -rf $(BIN)/manual
	GOOS= GOARCH= $(GO) run -tags manual ./cmd/nfsrdmad manual $(BIN)/manual

# Write docs/reference.md from the source.
reference:
	$(GO) test -count 1 -run '^TestReference$$' ./cmd/nfsrdmad -update

# Keep an existing configuration. mount(8) searches its helper in /sbin and /usr/sbin only.
install: build manual
	install -D -m 0755 $(BIN)/nfsrdmad $(DESTDIR)$(PREFIX)/sbin/nfsrdmad
	ln -sf nfsrdmad $(DESTDIR)$(PREFIX)/sbin/mount.nfsrdma
	test -e $(DESTDIR)/etc/nfsrdmad.toml || \
	  install -D -m 0644 configs/nfsrdmad.toml $(DESTDIR)/etc/nfsrdmad.toml
	install -D -m 0644 deploy/systemd/nfsrdmad.service $(DESTDIR)/usr/lib/systemd/system/nfsrdmad.service
	sed -i 's|=/usr/sbin/nfsrdmad|=$(PREFIX)/sbin/nfsrdmad|' $(DESTDIR)/usr/lib/systemd/system/nfsrdmad.service
	cd $(BIN)/manual && find . -type f -exec install -D -m 0644 {} $(abspath $(or $(DESTDIR),/))/$(PREFIX)/share/{} \;

$(NFPM):
	GOOS= GOARCH= GOBIN=$(CURDIR)/bin $(GO) install github.com/goreleaser/nfpm/v2/cmd/nfpm@$(NFPM_VERSION)
	mv bin/nfpm $@

# Packages of what "make install" installs, in $(DIST). See docs/install.md.
deb rpm: BIN = $(DIST)/$@.build
deb rpm: export SOURCE_DATE_EPOCH = $(COMMIT_TIME)
deb rpm: export PKGVERSION = $(shell deploy/package/version.sh '$(VERSION)' '$(COMMIT_TIME)')
deb rpm: export MAINTAINER ?= $(shell git log -1 --format='%an <%ae>')
deb rpm: export NFPM_PROGRAM = $(NFPM)
deb rpm: $(NFPM)
	@test -n "$(RDMACORE)" -o "$(origin RDMACORE)" = "command line" || { echo "make $@: the rdma-core provider needs" \
	  "libibverbs-dev, librdmacm-dev and a C compiler; install them, or run make $@ RDMACORE= for a package without it"; \
	  exit 1; }
	rm -rf $(BIN)
	$(MAKE) --no-print-directory install BIN=$(BIN) PREFIX=/usr DESTDIR=$(abspath $(BIN)/root) \
	  GOFLAGS="$(GOFLAGS) -ldflags=-s"
	GOARCH=$$($(GO) env GOARCH) deploy/package/build.sh $@ $(abspath $(BIN)/root) $(DIST)
	rm -rf $(BIN)
	@ls -l $(DIST)/*.$@

# A container image for podman, Docker and Kubernetes. It has the rdma-core provider where its headers
# are installed. CONTAINER_TOOL is podman, buildah or docker.
CONTAINER_TOOL ?= podman
IMAGE ?= nfsrdmad
image:
	rm -rf $(DIST)/image
	$(MAKE) --no-print-directory build BIN=$(DIST)/image GOFLAGS="$(GOFLAGS) -ldflags=-s"
	cp LICENSE $(DIST)/image/
	deploy/package/copyright.sh $(DIST)/image/nfsrdmad >$(DIST)/image/copyright
	$(CONTAINER_TOOL) build -t $(IMAGE):$(VERSION) -f deploy/container/Containerfile $(DIST)/image

clean:
	rm -rf bin $(DIST)
