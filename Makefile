# "make demo" and "make test" do their own setup on a Debian with Go, as root. See README.md and
# CONTRIBUTING.md.
SHELL   := /bin/bash
GO      ?= go
PREFIX  ?= /usr
# Debian packages for "make test": a second NFS server, an independent decoder, and programs that
# work on a mount.
DEBS    := nfs-ganesha nfs-ganesha-vfs rpcbind nfs-common tshark fuse3 acl rsync git systemd dbus-daemon procps iproute2 \
           libibverbs-dev librdmacm-dev gcc libc6-dev
# Programs for "make test-programs".
PROGRAMS := postgresql postgresql-contrib sqlite3 dbench stress-ng fio rsync tar git
FUZZTIME ?= 60s
LINT    := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
# Switches FUSE over io_uring on, on kernels that have it, while a command runs.
WITH_URING := test/with-uring
# The rdma-core provider needs a C compiler and the headers of rdma-core. The program opens the
# libraries at run time, so it also runs on hosts without them.
RDMACORE := $(if $(and $(wildcard /usr/include/rdma/rdma_cma.h),$(shell command -v $${CC:-gcc})),-tags rdmacore)
# Go takes the version that "nfsrdmad version" prints from the newest tag.
VERSION  = $(shell git describe --tags --always --dirty)
DIST     = dist

.PHONY: build check demo test test-programs lab test-lab test-lab-all bench soak fuzz mutants lint deps install release clean

build:
	CGO_ENABLED=$(if $(RDMACORE),1,0) $(GO) build $(RDMACORE) -buildvcs=auto -trimpath -o bin/nfsrdmad ./cmd/nfsrdmad

# Unit tests: need Go and nothing else.
check:
	NFSRDMAD_LAB=0 $(GO) test -short -timeout 5m ./...

# Mount from the embedded server. Needs Go, root and /dev/fuse.
demo: build
	bin/nfsrdmad demo

test-programs: DEBS += $(PROGRAMS)

deps:
	@missing=; for p in $(DEBS); do \
	  dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q '^install ok installed' || missing="$$missing $$p"; \
	done; \
	if [ -n "$$missing" ]; then echo "installing$$missing"; \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
	@$(GO) mod download # tests build the program, and test/isolate has no network

# Each package runs in namespaces of its own, so that packages can run at the same time. Those that
# take longest start first.
test: deps
	$(WITH_URING) env NFSRDMAD_LAB=0 $(GO) test -race $$(test -e /usr/include/rdma/rdma_cma.h && echo -tags rdmacore) \
	  -exec $(CURDIR)/test/isolate -timeout 30m ./test/integration ./pkg/fusefs ./cmd/nfsrdmad ./...
	# The tests of the file system again, over io_uring. The race detector has seen them above.
	NFSRDMAD_TEST_FRONT=uring $(WITH_URING) env NFSRDMAD_LAB=0 $(GO) test -skip Takeover -exec $(CURDIR)/test/isolate \
	  -timeout 15m ./pkg/fusefs
	# Not possible under the race detector.
	out=$$($(GO) test -v -run '^TestCallsDoNotAllocate$$' ./pkg/nfs3); echo "$$out"; \
	  grep -q '^--- PASS: TestCallsDoNotAllocate' <<< "$$out"

# Real programs on mounts, with their own checks. Takes about an hour.
test-programs: deps
	NFSRDMAD_PROGRAMS=1 $(GO) test -v -count 1 -exec $(CURDIR)/test/isolate -timeout 3h ./test/programs

# Build the virtual machines from Debian packages. See test/lab/README.md.
lab:
	test/lab/image/build.sh

# Test against stock Linux servers on the newest kernel. The log has the measured figures.
test-lab: deps lab
	NFSRDMAD_LAB=1 $(GO) test -v -p 2 -count 1 -exec $(CURDIR)/test/isolate -timeout 80m ./test/lab/...

# Test against every kernel and device. This takes hours.
test-lab-all: deps lab
	NFSRDMAD_LAB=all $(GO) test -v -p 1 -count 1 -exec $(CURDIR)/test/isolate -timeout 6h ./test/lab/...

# Every benchmark runs beside a raw TCP yardstick. Compare figures of one run only.
bench:
	$(GO) test -run '^$$' -bench . -benchmem ./...

# 10,000 disconnects under verified I/O, random operations compared with a local directory, power
# failures of three servers, restarts of the daemon under load, and real programs. "make test" and
# "make test-lab" run short forms of all but the last.
soak: test-programs lab
	NFSRDMAD_STORM=10000 NFSRDMAD_VERIFY=all $(GO) test -run TestStorm -v -count 1 -timeout 3h ./test/integration
	NFSRDMAD_DIFFERENTIAL=15m $(GO) test -run '^TestDifferential$$' -v -count 1 -timeout 2h ./test/integration
	NFSRDMAD_POWER=400 $(GO) test -run '^(TestPowerFailure|TestPowerDaemon)$$' -v -count 1 -timeout 6h \
	  ./test/integration
	$(WITH_URING) env NFSRDMAD_LAB=1 NFSRDMAD_RESTARTS=20 $(GO) test -v -count 1 -exec $(CURDIR)/test/isolate -timeout 2h ./test/restart
	NFSRDMAD_LAB=1 NFSRDMAD_POWER=200 $(GO) test -run '^TestServers$$/softiwarp$$/^power_failures$$' -v -timeout 6h \
	  -exec $(CURDIR)/test/isolate ./test/lab/knfsd

fuzz:
	@set -e; for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	    echo "== $$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p; \
	  done; done

# Check that tests fail when the code is wrong. Takes hours. See test/mutants.
mutants:
	$(GO) run ./test/mutants

lint:
	$(GO) run $(LINT) run ./...
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
	  cp ../LICENSE ../README.md ../CHANGELOG.md ../configs/nfsrdmad.toml ../deploy/systemd/nfsrdmad.service $$d/; \
	  tar --sort=name --owner=0 --group=0 --mtime="@$$(git log -1 --format=%ct)" -czf $$d.tar.gz $$d; rm -r $$d; \
	done; sha256sum *.tar.gz > SHA256SUMS; cat SHA256SUMS

# Keep an existing configuration. mount(8) searches its helper in /sbin and /usr/sbin only.
install: build
	install -D -m 0755 bin/nfsrdmad $(DESTDIR)$(PREFIX)/sbin/nfsrdmad
	ln -sf nfsrdmad $(DESTDIR)$(PREFIX)/sbin/mount.nfsrdma
	test -e $(DESTDIR)/etc/nfsrdmad.toml || \
	  install -D -m 0644 configs/nfsrdmad.toml $(DESTDIR)/etc/nfsrdmad.toml
	install -D -m 0644 deploy/systemd/nfsrdmad.service $(DESTDIR)/lib/systemd/system/nfsrdmad.service
	sed -i 's|=/usr/sbin/nfsrdmad|=$(PREFIX)/sbin/nfsrdmad|' $(DESTDIR)/lib/systemd/system/nfsrdmad.service

clean:
	rm -rf bin $(DIST)
