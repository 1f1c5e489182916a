// Package metrics shows the statistics of mounts as Prometheus metrics, and as the "xprt:" line of
// the kernel's mountstats.
//
// The counters belong to other packages, which declare their names and help texts: xprt.Numbers,
// vfs.Counters, nlm.Counters. This package counts only times ([Times]). A [Collector] keeps no
// state between scrapes: each scrape asks a function for one [Snapshot] per mount. A mount that has
// ended is missing from the next scrape, and the data path does no work for a scrape.
//
// # Names
//
// All names begin with nfsrdmad_ and use base units. Counters end in _total. The labels of a mount
// are mount, server and provider. The transport counters keep the names of the kernel's NFS/RDMA
// client. [XprtLine] and the transport counters implement row S23 of features.md; the metric
// nfsrdmad_mrs implements rows S1 and S12.
//
// # Locks
//
// The package has no locks. [Times] consist of atomics; everything else is a copy.
//
// # Times
//
// An ended RPC or FUSE request is counted once, in one [Times]. It is shown as two metrics: a
// histogram of the durations, and a native histogram of Prometheus for each phase. The buckets of
// the phases are counted here and not by the client library, whose native histograms take a lock
// and allocate. A scraper without native histograms gets the count and the sum.
package metrics
