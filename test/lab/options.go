package lab

import "net/netip"

// Kernels are the kernel series for which "make lab" builds images, the newest first. Prefer the
// newest: 6.1 leaks a protection domain for each connection that it refuses.
var Kernels = []string{"6.12", "6.1"}

// RDMA providers of a guest.
const (
	SIW  = "siw" // iWARP over TCP; the host reaches it at Guest.RDMA
	RXE  = "rxe" // RoCE version 2 over UDP; reachable in the guest or over a Link
	Both = "siw,rxe"
	None = "none" // NFS over TCP only
)

// Exports of every guest. All except ExportFast are on a disk, whose content survives resets.
const (
	ExportRW      = "/export"  // read-write, no root squash, any source port
	ExportRO      = "/ro"      // read-only
	ExportSquash  = "/squash"  // root squash
	ExportSecure  = "/secure"  // requires a source port below 1024
	ExportRefused = "/refused" // exported to another host only
	// ExportFast is in the guest's memory. The server replies before data is stable, and the export
	// is empty after a reset.
	ExportFast = "/fast"
)

// Options describe a guest. The zero value is a guest with the newest kernel and siw.
type Options struct {
	Kernel    string // one of Kernels; "" is the first
	Name      string // name in logs; "" is the kernel series
	Provider  string // SIW, RXE, Both or None; "" is SIW
	MemoryMiB int    // memory in MiB; 0 is 1024
	CPUs      int    // processors; 0 is 2
	DiskMiB   int    // size in MiB of a sparse disk; 0 is 8192
	Threads   int    // nfsd threads; 0 is 8
	Credits   int    // credits of each connection, 4 to 16384; 0 is the kernel's default, 64
	Inline    int    // inline threshold in bytes, 4096 to 65536; 0 is the kernel's default, 4096
	// MaxBlock is the largest READ and WRITE in bytes. 0 is 1 MiB, which the kernel by itself
	// offers only with more than 4 GiB of memory.
	MaxBlock int
	// KillSafe keeps each RDMA connection of the host open for a short time, also when the client
	// is killed while it connects. Without it, siw loses its listener when a connection ends right
	// after its start.
	KillSafe bool
	// Share is a directory of the host that the guest mounts read-write at /share; "" is none. It
	// cannot contain spaces, commas or quotes.
	Share string
	// HostRoot mounts the host's root file system read-only at /host. "chroot /host PROGRAM" runs a
	// program of the host, with its libraries, on the guest's kernel and devices, including
	// /dev/fuse and RDMA. In the chroot /tmp, /var/tmp and /run are empty tmpfs mounts, and Share
	// has its host path. A guest may not see the host's changes to files that the guest has already
	// read: put results into Share.
	HostRoot bool
	// Virtiofs is the socket of a vhost-user-fs device that the guest mounts with
	// "mount -t virtiofs share DIR"; "" is none. It cannot contain commas.
	Virtiofs string
	// Systemd boots a whole Debian with systemd, whose root file system is a copy of the image that
	// "make lab" builds. It has no NFS server and no RDMA device. HostRoot, Link and Provider have
	// no effect.
	Systemd bool
	// Link joins the guest to a link, by a card eth1 with Address. Without Address the link assigns
	// the next one of 10.9.0.0/24. The RDMA device is then on eth1, not on eth0: other guests reach
	// it at Guest.Linked, and the host cannot reach it.
	Link    *Link `json:"-"`
	Address netip.Prefix
	// ExpectedKernelErrors are regular expressions for kernel errors that the test provokes. They
	// match the first line of an error.
	ExpectedKernelErrors []string
}

const (
	defaultMemoryMiB = 1024
	defaultCPUs      = 2
	defaultDiskMiB   = 8192
	defaultThreads   = 8
	defaultMaxBlock  = 1 << 20
)

func (o Options) withDefaults() Options {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	if o.Kernel == "" {
		o.Kernel = Kernels[0]
	}
	if o.Name == "" {
		o.Name = o.Kernel
	}
	if o.Provider == "" {
		o.Provider = SIW
	}
	def(&o.MemoryMiB, defaultMemoryMiB)
	def(&o.CPUs, defaultCPUs)
	def(&o.DiskMiB, defaultDiskMiB)
	def(&o.Threads, defaultThreads)
	def(&o.MaxBlock, defaultMaxBlock)
	return o
}
