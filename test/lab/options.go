package lab

import "net/netip"

// Kernels are the series of which "make lab" builds images, the newest first. It is the one to take
// where one will do: 6.1 leaks a protection domain with each connection it refuses.
var Kernels = []string{"6.12", "6.1"}

// Providers of RDMA in a guest.
const (
	SIW  = "siw" // iWARP over TCP; the host reaches it at Guest.RDMA
	RXE  = "rxe" // RoCE version 2 over UDP; within the guest, or by a Link
	Both = "siw,rxe"
	None = "none" // NFS over TCP alone
)

// Exports of every guest. All but ExportFast are on a disk that survives resets.
const (
	ExportRW      = "/export"  // read-write, root is root, any source port
	ExportRO      = "/ro"      // read-only
	ExportSquash  = "/squash"  // root is nobody
	ExportSecure  = "/secure"  // from source ports below 1024 only
	ExportRefused = "/refused" // to another host only
	// in the guest's memory, empty after a reset, replies before data is safe
	ExportFast = "/fast"
)

// Options say what to boot. The zero value is a guest of the newest kernel with siw.
type Options struct {
	Kernel    string // one of Kernels; "" is the first
	Name      string // in logs; "" is the kernel's series
	Provider  string // SIW, RXE, Both or None; "" is SIW
	MemoryMiB int    // 0 is 1024
	CPUs      int    // 0 is 2
	DiskMiB   int    // of a sparse disk; 0 is 8192
	Threads   int    // of nfsd; 0 is 8
	Credits   int    // granted to each connection, 4 to 16384; 0 is the kernel's own 64
	Inline    int    // octets of the inline threshold, 4096 to 65536; 0 is the kernel's own 4096
	// octets, largest READ and WRITE; 0 is 1 MiB, which the kernel itself offers above 4 GiB of
	// memory only
	MaxBlock int
	// directory of the host that is /share in the guest, read-write; "" is none. No spaces, commas
	// or quotes
	Share string
	// HostRoot puts the host's root file system at /host, read-only: "chroot /host PROGRAM" runs
	// the host's program, with its libraries, on the guest's kernel and devices, /dev/fuse and RDMA
	// among them. In it /tmp, /var/tmp and /run are memory and empty, and Share has the path that
	// it has on the host. What the host changes in files that the guest has read may not be seen:
	// results belong in Share.
	HostRoot bool
	// Link joins the guest to others, by a card eth1 with Address there; none chosen is the next of
	// 10.9.0.0/24. The RDMA device is on eth1 then, and not on eth0, so that guests reach it, at
	// Guest.Linked, and the host does not.
	Link    *Link `json:"-"`
	Address netip.Prefix
	// Complaints are regular expressions of kernel complaints that the test provokes, each matched
	// against the first line of one.
	Complaints []string
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
