package nfsserve

import (
	"bufio"
	"context"
	"fmt"
	"hash/maphash"
	"io/fs"
	"net"
	"slices"
	"sync"

	"github.com/go-git/go-billy/v5"
	nfs "github.com/willscott/go-nfs"
	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/internal/rpctcp"
)

// A worker is one go-nfs server with one connection, an in-memory pipe, on which it executes one
// call at a time. That is how the call's credential reaches the file system: go-nfs itself has no
// notion of it.
type worker struct {
	fs    *exportFS
	pipe  net.Conn
	read  *bufio.Reader
	reply []byte
}

// newWorker starts a worker. Its goroutines end when the pipe is closed.
func newWorker(ctx context.Context, e *export, verifier [8]byte, wg *sync.WaitGroup) *worker {
	ours, theirs := net.Pipe()
	w := &worker{fs: &exportFS{tree: e.tree, readOnly: e.readOnly}, pipe: ours,
		read: bufio.NewReaderSize(ours, pipeBuffer)}
	srv := &nfs.Server{Handler: &handler{export: e, fs: w.fs}, ID: verifier, Context: ctx}
	l := &oneConn{conn: theirs, closed: ctx.Done()}
	wg.Go(func() { _ = srv.Serve(l) })
	return w
}

const pipeBuffer = 64 << 10

// call has go-nfs execute one well-formed call. The reply is valid until the next.
func (w *worker) call(msg []byte) ([]byte, error) {
	if err := rpctcp.WriteRecord(w.pipe, msg); err != nil {
		return nil, fmt.Errorf("pass call to NFS server: %w", err)
	}
	var err error
	if w.reply, err = rpctcp.ReadRecord(w.read, w.reply, maxRecord); err != nil {
		return nil, fmt.Errorf("NFS server's reply: %w", err)
	}
	return w.reply, nil
}

// oneConn is a listener that accepts one connection, and then waits for the end.
type oneConn struct {
	conn   net.Conn
	closed <-chan struct{}
	once   bool
}

// Accept returns the connection, then waits for the end.
func (l *oneConn) Accept() (net.Conn, error) {
	if !l.once {
		l.once = true
		return l.conn, nil
	}
	<-l.closed
	return nil, net.ErrClosed
}

// Close does nothing: the connection outlives the listener.
func (l *oneConn) Close() error { return nil }

// Addr is a pipe's.
func (l *oneConn) Addr() net.Addr { return l.conn.LocalAddr() }

// handler is what go-nfs asks of an export.
type handler struct {
	*export
	fs *exportFS
}

var (
	_ nfs.Handler        = (*handler)(nil)
	_ nfs.CachingHandler = (*handler)(nil)
)

// Mount grants the export's root.
func (h *handler) Mount(_ context.Context, _ net.Conn, req nfs.MountRequest) (nfs.MountStatus, billy.Filesystem,
	[]nfs.AuthFlavor) {
	if !h.exports(string(req.Dirpath)) {
		return nfs.MountStatusErrNoEnt, h.fs, nil
	}
	return nfs.MountStatusOk, h.fs, []nfs.AuthFlavor{nfs.AuthFlavorUnix, nfs.AuthFlavorNull}
}

// Change changes attributes.
func (h *handler) Change(billy.Filesystem) billy.Change {
	if h.readOnly {
		return nil
	}
	return h.fs
}

// FSStat tells the room on the directory's file system.
func (h *handler) FSStat(_ context.Context, _ billy.Filesystem, s *nfs.FSStat) error {
	var st unix.Statfs_t
	if err := unix.Statfs(h.dir, &st); err != nil {
		return err
	}
	size := uint64(st.Bsize)
	s.TotalSize, s.FreeSize, s.AvailableSize = st.Blocks*size, st.Bfree*size, st.Bavail*size
	s.TotalFiles, s.FreeFiles, s.AvailableFiles = st.Files, st.Ffree, st.Ffree
	return nil
}

// ToHandle is the tree's.
func (h *handler) ToHandle(_ billy.Filesystem, path []string) []byte { return h.tree.toHandle(path) }

// FromHandle is the tree's.
func (h *handler) FromHandle(fh []byte) (billy.Filesystem, []string, error) {
	p, ok := h.tree.fromHandle(fh)
	if !ok {
		return nil, nil, &nfs.NFSStatusError{NFSStatus: nfs.NFSStatusStale}
	}
	return h.fs, p, nil
}

// InvalidateHandle does nothing: the file system tells the tree what went and what moved.
func (h *handler) InvalidateHandle(billy.Filesystem, []byte) error { return nil }

// HandleLimit bounds the entries of one READDIR reply, which its count does already.
func (h *handler) HandleLimit() int { return 1 << 20 }

// VerifierFor keeps a listing under a verifier made of its names.
func (h *handler) VerifierFor(path string, contents []fs.FileInfo) uint64 {
	var m maphash.Hash
	m.SetSeed(h.listings.seed)
	m.WriteString(path)
	for _, c := range contents {
		m.WriteByte(0)
		m.WriteString(c.Name())
	}
	v := m.Sum64() | 1 // zero means none
	h.listings.put(listing{path, v, contents})
	return v
}

// DataForVerifier finds a listing again, nil when it is gone. The attributes of those entries that
// this call may answer with are today's.
func (h *handler) DataForVerifier(path string, v uint64) []fs.FileInfo {
	entries := slices.Clone(h.listings.get(path, v))
	// The cookie of entry i is i+2, and the call goes on behind that.
	for i := max(h.fs.cookie, 1) - 1; i < uint64(len(entries)) && i < h.fs.cookie+uint64(h.fs.page); i++ {
		if info, err := h.tree.root.Lstat(clean(path + "/" + entries[i].Name())); err == nil {
			entries[i] = wireInfo{info}
		}
	}
	return entries
}

// maxListings is how many directories are remembered between two READDIRs.
const maxListings = 64

type listing struct {
	path     string
	verifier uint64
	entries  []fs.FileInfo
}

// listings remembers directory contents while clients page through them, the oldest overwritten
// first.
type listings struct {
	seed maphash.Seed

	mu   sync.Mutex
	ring [maxListings]listing // guarded by mu
	next int                  // guarded by mu
}

func (l *listings) put(e listing) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.ring {
		if l.ring[i].verifier == e.verifier && l.ring[i].path == e.path {
			l.ring[i] = e
			return
		}
	}
	l.ring[l.next] = e
	l.next = (l.next + 1) % maxListings
}

func (l *listings) get(path string, v uint64) []fs.FileInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.ring {
		if l.ring[i].verifier == v && l.ring[i].path == path {
			return l.ring[i].entries
		}
	}
	return nil
}
