package vfs

import (
	"sync/atomic"

	"github.com/nfsrdmad/nfsrdmad/pkg/fuse/kernel"
	"github.com/nfsrdmad/nfsrdmad/pkg/observe/stats"
)

// Counters holds the counters of one FS. The counters only grow. Reading them is safe at any time.
type Counters struct {
	Ops    [kernel.NumOps]atomic.Uint64 // requests by kind
	Errors [kernel.NumOps]atomic.Uint64 // requests that failed, by kind

	// Metrics says what the others count.
	ReadBytes, WrittenBytes, SentBytes                              atomic.Uint64
	Commits, Replays, ReplayedBytes, WriteErrors, WriteThroughs     atomic.Uint64
	BufferWaits, JukeboxRetries, Interrupts, InvalidReplies, Panics atomic.Uint64
	SillyRenames, Stale, CacheDrops, NameDrops, Renewals            atomic.Uint64
	ReadDirRestarts, NodesWithoutRecord, GroupsUnknown, GroupsCut   atomic.Uint64
}

// Metrics returns the counters without Ops and Errors.
func (c *Counters) Metrics() []stats.Metric {
	return []stats.Metric{
		stats.New("read_bytes_total", "File bytes returned to the kernel.", &c.ReadBytes),
		stats.New("written_bytes_total", "File bytes received from the kernel.", &c.WrittenBytes),
		stats.New("write_sent_bytes_total", "File bytes accepted by servers with WRITE, including bytes sent again.",
			&c.SentBytes),
		stats.New("commits_total", "COMMIT calls.", &c.Commits),
		stats.New("write_replays_total", "Replays of unstable data because the write verifier of the server changed.",
			&c.Replays),
		stats.New("write_replayed_bytes_total", "File bytes sent again because the write verifier of the server "+
			"changed.", &c.ReplayedBytes),
		stats.New("write_errors_total", "Extents of dirty data dropped after an error; fsync or close returned the "+
			"error.", &c.WriteErrors),
		stats.New("buffer_waits_total", "Requests that waited for a free buffer, or for room in dirty_bytes.",
			&c.BufferWaits),
		stats.New("silly_renames_total", "Open files renamed instead of removed.", &c.SillyRenames),
		stats.New("invalid_replies_total", "Replies that break NFSv3, such as a directory without end.",
			&c.InvalidReplies),
		stats.New("write_throughs_total", "Writes without write-behind, because the server was busy with other files.",
			&c.WriteThroughs),
		stats.New("jukebox_retries_total", "Calls retried after NFS3ERR_JUKEBOX.", &c.JukeboxRetries),
		stats.New("fuse_interrupts_total", "Requests canceled by a fatal signal or by the end of the mount.",
			&c.Interrupts),
		stats.New("stale_handles_total", "Files and directories dropped after NFS3ERR_STALE.", &c.Stale),
		stats.New("cache_drops_total", "Drops of the cached data of a file, after a change by another client or for "+
			"a lock.", &c.CacheDrops),
		stats.New("name_drops_total", "Cached names that expired because another client had changed the directory.",
			&c.NameDrops),
		stats.New("panics_total", "Internal errors (panics) of the file system. The first one ends the mount.",
			&c.Panics),
		stats.New("groups_unknown_total", "Credentials without supplementary groups, because the groups of the "+
			"process could not be read.", &c.GroupsUnknown),
		stats.New("groups_cut_total", "Credentials with only the first 16 groups of the process, the maximum of "+
			"AUTH_SYS.", &c.GroupsCut),
		stats.New("nodes_without_record_total", "Files and directories that a restart does not keep, because too many "+
			"are in use.", &c.NodesWithoutRecord),
		stats.New("attribute_renewals_total", "READDIRPLUS calls that renewed the attributes of files for a walk of "+
			"their directory.", &c.Renewals),
		stats.New("readdir_restarts_total", "Directories read again from the start after NFS3ERR_BAD_COOKIE.",
			&c.ReadDirRestarts),
	}
}
