# make demo and make test do all their own set-up on a Debian with Go, as root; see README.md.
SHELL       := /bin/bash
GO          ?= go
PREFIX      ?= /usr
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
# What the tests use of Debian: a real NFS server, an independent decoder, and the programs that work on a mount.
DEBS        := nfs-ganesha nfs-ganesha-vfs rpcbind tshark fuse3 rsync git systemd procps iproute2 libibverbs-dev librdmacm-dev gcc libc6-dev
FUZZTIME    ?= 60s
# The rdma-core provider is built in where its headers are; the libraries are opened at run time, so the program runs without them.
# It takes a C compiler, too.
RDMACORE    := $(if $(and $(wildcard /usr/include/rdma/rdma_cma.h),$(shell command -v $${CC:-gcc})),-tags rdmacore)

.PHONY: build demo test lab test-lab test-lab-all bench soak fuzz lint deps install clean

build:
	CGO_ENABLED=$(if $(RDMACORE),1,0) $(GO) build $(RDMACORE) -trimpath -o bin/nfsrdmad ./cmd/nfsrdmad

# The main job on the embedded server: needs Go, root and /dev/fuse, nothing else.
demo: build
	bin/nfsrdmad demo

deps:
	@missing=; for p in $(DEBS); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q '^install ok installed' || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then echo "installing$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; fi

# One package at a time: the servers and mounts of two would share two cores, and each other's mount namespaces.
test: deps
	NFSRDMAD_LAB=0 $(GO) test -race $$(test -e /usr/include/rdma/rdma_cma.h && echo -tags rdmacore) -p 1 -timeout 30m ./...
	$(GO) test -run '^TestNoAllocations$$' ./pkg/nfs3 # cannot run under the race detector

# Virtual machines with stock Linux servers, from Debian packages: minutes the first time, nothing after that. See test/lab/README.md.
lab:
	test/lab/image/build.sh

# The tests against them, on the newest kernel and the device that shows most. The log has what they measure, too.
test-lab: deps lab
	NFSRDMAD_LAB=1 $(GO) test -v -p 2 -count 1 -timeout 80m ./test/lab/...

# All of them, on every kernel and device: hours.
test-lab-all: deps lab
	NFSRDMAD_LAB=all $(GO) test -v -p 1 -count 1 -timeout 6h ./test/lab/...

# Every benchmark runs beside a raw TCP yardstick; compare within one run.
bench:
	$(GO) test -run '^$$' -bench . -benchmem ./...

# The long form of the storm that make test runs: 10,000 disconnects under verified I/O.
soak: deps
	NFSRDMAD_STORM=10000 NFSRDMAD_VERIFY=all $(GO) test -run TestStorm -v -timeout 3h ./test/integration

fuzz:
	@set -e; for p in $$($(GO) list ./...); do for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	  echo "== $$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p; done; done

lint: deps
	@out=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$out" || { echo "gofmt would change: $$out"; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags rdmacore ./...
	$(GO) run $(STATICCHECK) ./...
	$(GO) run $(STATICCHECK) -tags rdmacore ./pkg/verbs/rdmacore ./pkg/mount ./pkg/daemon ./cmd/nfsrdmad

# A configuration that is there stays. mount(8) looks for its helper in /usr/sbin and /sbin alone.
install: build
	install -D -m 0755 bin/nfsrdmad $(DESTDIR)$(PREFIX)/sbin/nfsrdmad
	ln -sf nfsrdmad $(DESTDIR)$(PREFIX)/sbin/mount.nfsrdma
	test -e $(DESTDIR)/etc/nfsrdmad.toml || install -D -m 0644 configs/nfsrdmad.toml $(DESTDIR)/etc/nfsrdmad.toml
	install -D -m 0644 deploy/systemd/nfsrdmad.service $(DESTDIR)/lib/systemd/system/nfsrdmad.service
	sed -i 's|=/usr/sbin/nfsrdmad|=$(PREFIX)/sbin/nfsrdmad|' $(DESTDIR)/lib/systemd/system/nfsrdmad.service

clean:
	rm -rf bin
