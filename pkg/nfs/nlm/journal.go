package nlm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nlm/nlmwire"
	"github.com/nfsrdmad/nfsrdmad/pkg/sunrpc"
)

// journalFile is the journal in the state directory.
const journalFile = "held-locks"

// Limits of a journal.
const (
	maxJournalEntry = 4 << 10 // bytes of one line
	maxJournalStale = maxLocks
	minJournalLines = 1024 // a longer journal is rewritten when most of its lines are obsolete
)

// staleRetry is the time between attempts to release the locks of a killed daemon.
const staleRetry = time.Minute

// A journalEntry names an owner that may have locks of a file at a server, with all that UNLOCK
// needs.
type journalEntry struct {
	Host       string `json:"host"`
	Caller     string `json:"caller"`
	Port       int    `json:"port,omitempty"`
	MountPort  int    `json:"mount_port,omitempty"`
	MountFirst bool   `json:"mount_first,omitempty"`
	Cred       []byte `json:"cred"`
	FH         []byte `json:"fh"`
	OH         []byte `json:"oh"`
	SVID       uint32 `json:"svid"`
	Released   bool   `json:"released,omitempty"` // the owner has no locks of the file any more
}

type journalKey struct {
	host, fh, oh string
	svid         uint32
}

func (e *journalEntry) key() journalKey {
	return journalKey{e.Host, string(e.FH), string(e.OH), e.SVID}
}

// A journal remembers on disk which owners may have locks at servers, so that the next daemon can
// release the locks of a killed one. It survives the end of the process. It does not survive every
// end of the host, because it is not written synchronously. A nil *journal is valid and does
// nothing.
type journal struct {
	path string
	log  hclog.Logger

	mu      sync.Mutex // guards the fields below
	f       *os.File   // locked (flock(2)), so that one process has the journal
	live    map[journalKey]*journalEntry
	stale   map[journalKey]struct{} // entries of an earlier process that no client has claimed
	lines   int
	partial bool // the last line may have no end
	failed  bool // a failed write was logged
}

// openJournal opens the journal in dir, which logs failed writes. The entries that an earlier
// process left are stale.
func openJournal(dir string, log hclog.Logger) (j *journal, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	j = &journal{path: filepath.Join(dir, journalFile), log: log, live: make(map[journalKey]*journalEntry),
		stale: make(map[journalKey]struct{})}
	if j.f, err = os.OpenFile(j.path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600); err != nil {
		return nil, err
	}
	if err := unix.Flock(int(j.f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		j.f.Close()
		return nil, fmt.Errorf("%s: in use by another process: %w", j.path, err)
	}
	in := bufio.NewScanner(j.f)
	in.Buffer(nil, maxJournalEntry)
	for in.Scan() {
		j.lines++
		e := new(journalEntry)
		if json.Unmarshal(in.Bytes(), e) != nil {
			continue // incomplete: its process was killed
		}
		if e.Released {
			delete(j.live, e.key())
		} else if len(j.live) < maxJournalStale {
			j.live[e.key()] = e
		}
	}
	j.partial = j.lines > 0 // the empty line that may follow is skipped
	for key := range j.live {
		j.stale[key] = struct{}{}
	}
	return j, nil
}

// claim returns the stale entries of a client, whose owner handles begin with instance. They are no
// longer stale: the client removes them.
func (j *journal) claim(host string, instance []byte) []*journalEntry {
	if j == nil {
		return nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	var claimed []*journalEntry
	for key := range j.stale {
		if e := j.live[key]; e.Host == host && bytes.HasPrefix(e.OH, instance) {
			claimed = append(claimed, e)
			delete(j.stale, key)
		}
	}
	return claimed
}

// staleEntries returns the entries that are stale.
func (j *journal) staleEntries() []*journalEntry {
	if j == nil {
		return nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	var all []*journalEntry
	for key := range j.stale {
		all = append(all, j.live[key])
	}
	return all
}

func (j *journal) isStale(key journalKey) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	_, stale := j.stale[key]
	return stale
}

// close removes the journal if no owner may have locks.
func (j *journal) close() {
	if j == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.live) == 0 {
		_ = os.Remove(j.path) // a later daemon then only reads an obsolete journal
	}
	j.f.Close()
}

// add records that an owner may have locks.
func (j *journal) add(e *journalEntry) {
	if j == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.stale, e.key())
	if j.live[e.key()] == nil {
		j.live[e.key()] = e
		j.write(e)
	}
}

// remove records that an owner has no locks.
func (j *journal) remove(key journalKey) {
	if j == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	e := j.live[key]
	if e == nil {
		return
	}
	delete(j.live, key)
	delete(j.stale, key)
	if j.lines > minJournalLines && j.lines > 4*len(j.live) {
		j.rewrite()
		return
	}
	j.write(&journalEntry{Host: e.Host, FH: e.FH, OH: e.OH, SVID: e.SVID, Released: true})
}

// write appends a line. The caller holds mu.
func (j *journal) write(e *journalEntry) {
	line, err := json.Marshal(e)
	if err == nil {
		if j.partial {
			line = append([]byte{'\n'}, line...)
		}
		_, err = j.f.Write(append(line, '\n'))
		j.partial = err != nil
	}
	j.lines++
	j.check(err)
}

// check logs the first failed write. The caller holds mu.
func (j *journal) check(err error) {
	if err != nil && !j.failed {
		j.failed = true
		j.log.Warn("locks may stay at servers if this daemon is killed: write to the journal failed", "error", err)
	}
}

// rewrite replaces the content by the live entries. A process that is killed meanwhile leaves some
// of them out. The caller holds mu.
func (j *journal) rewrite() {
	if err := j.f.Truncate(0); err != nil {
		j.check(err)
		return
	}
	j.lines, j.partial = 0, false
	for _, e := range j.live {
		j.write(e)
	}
}

// openJournal opens the journal of the service.
func (s *Service) openJournal() {
	if s.cfg.StateDir == "" {
		return
	}
	j, err := openJournal(s.cfg.StateDir, s.log)
	if err != nil {
		s.log.Warn("locks stay at servers if this daemon is killed: cannot keep a journal", "error", err)
		if errors.Is(err, fs.ErrPermission) {
			s.log.Info("set state_dir to a directory of the daemon")
		}
		return
	}
	s.journal = j
}

// Restored tells a service with the option Restore that all clients that restore locks exist. It
// releases the other locks of the earlier daemon in the background. It precedes Close.
func (s *Service) Restored() {
	if s == nil {
		return
	}
	s.release.Do(func() {
		if stale := s.journal.staleEntries(); len(stale) > 0 {
			s.log.Info("releasing the locks of an earlier daemon", "owners", len(stale))
			s.work.Go(func() { s.releaseStale(stale) })
		}
	})
}

// A linkKey names the lock service of a server.
type linkKey struct {
	host            string
	port, mountPort int
	mountFirst      bool
}

// releaseStale unlocks what an earlier daemon left, until every server has answered.
func (s *Service) releaseStale(stale []*journalEntry) {
	for len(stale) > 0 {
		links := make(map[linkKey]*link)
		var rest []*journalEntry
		down := make(map[string]bool) // servers that do not answer
		for _, e := range stale {
			key := linkKey{e.Host, e.Port, e.MountPort, e.MountFirst}
			l := links[key]
			if l == nil {
				l = newLink(&Config{Host: e.Host, Port: e.Port, MountPort: e.MountPort,
					MountPortFirst: e.MountFirst}, nil)
				links[key] = l
			}
			if down[e.Host] || s.ctx.Err() != nil || !s.unlockStale(l, e) {
				down[e.Host] = true
				rest = append(rest, e)
			}
		}
		for _, l := range links {
			l.close()
		}
		if stale = rest; len(stale) > 0 && !sleep(s.ctx, staleRetry) {
			return
		}
	}
}

// unlockStale releases all locks of one owner of a file. It returns false if the server does not
// answer.
func (s *Service) unlockStale(l *link, e *journalEntry) bool {
	if len(e.FH) > nfs3.FHSize || len(e.OH) > 1024 {
		s.journal.remove(e.key()) // the file was damaged
		return true
	}
	if !s.journal.isStale(e.key()) {
		return true // a client has it
	}
	conn, err := l.get(s.ctx)
	if err != nil {
		s.log.Debug("locks of an earlier daemon not released", "server", e.Host, "error", err)
		return false
	}
	args := nlmwire.AppendArgs(nil, nlmwire.ProcUnlock, &nlmwire.Args{Cookie: []byte{0},
		Region: nlmwire.Region{Caller: e.Caller, FH: e.FH, OH: e.OH, SVID: e.SVID}})
	cred := e.Cred
	if len(cred) == 0 {
		cred = sunrpc.AppendAuthNone(nil)
	}
	var res nlmwire.Res
	results, err := l.exchange(s.ctx, conn, nlmwire.ProcUnlock, cred, args)
	if err != nil || nlmwire.ParseRes(nlmwire.ProcUnlock, results, &res) != nil ||
		res.Stat == nlmwire.DeniedGracePeriod {
		return false
	}
	s.journal.remove(e.key())
	return true
}

// journalKeyOf and journalEntryOf name an owner of a file in the journal.
func (c *Client) journalKeyOf(f *file, o *owner) journalKey {
	return journalKey{c.cfg.Host, string(f.fh.Bytes()), string(o.oh), o.svid}
}

func (c *Client) journalEntryOf(f *file, o *owner, cred []byte) *journalEntry {
	return &journalEntry{Host: c.cfg.Host, Caller: c.cfg.Caller, Port: c.cfg.Port, MountPort: c.cfg.MountPort,
		MountFirst: c.cfg.MountPortFirst, Cred: cred, FH: f.fh.Bytes(), OH: o.oh, SVID: o.svid}
}
