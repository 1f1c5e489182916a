// Package metrics shows the plain counters that the layers keep: as Prometheus collectors, and as
// the "xprt:" line of the kernel's mountstats.
//
// It counts nothing itself but time ([Histogram]), knows no transport and no file system, and keeps
// no state between scrapes: a [Collector] asks a function for one [Snapshot] per mount when it is
// scraped, so a mount that is gone is gone from the next scrape, and a scrape costs the data path
// nothing.
//
// # Names
//
// Prefix nfsrdmad_, base units, counters end in _total, labels mount, server and provider. The
// transport's counters keep the names that the kernel's NFS/RDMA client gives them.
// docs/features.md row S23 (orphaned, recovered, recycled, allocated, local_inv_needed) is answered
// by [Transport] and [XprtLine], rows S1 and S12 (MRs by state) by [Transport.MRs].
//
// # Locks
//
// There are none: [Histogram] is made of atomics, everything else is passed by value.
package metrics
