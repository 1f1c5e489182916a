package lab

import (
	"bufio"
	"encoding/binary"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// The file format of pcap, of the Internet draft draft-ietf-opsawg-pcap: a header for the file, and
// one for each packet.
const (
	pcapMagic     = 0xa1b23c4d // times are in nanoseconds
	pcapMajor     = 2
	pcapMinor     = 4
	pcapEthernet  = 1
	pcapFileSize  = 24
	pcapFrameSize = 16
	// tapBuffer is in octets, what a tap keeps in memory.
	tapBuffer = 1 << 20
)

// A tap writes the frames that pass a link to a file.
type tap struct {
	// held while the file is written: the link is not faster than its record, so that nothing is
	// missing there
	mu   sync.Mutex
	file *os.File // guarded by mu; nil when it is whole
	w    *bufio.Writer
	err  error // guarded by mu: the first that there was
}

func newTap(name string) (*tap, error) {
	f, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	t := &tap{file: f, w: bufio.NewWriterSize(f, tapBuffer)}
	var h [pcapFileSize]byte
	binary.LittleEndian.PutUint32(h[0:], pcapMagic)
	binary.LittleEndian.PutUint16(h[4:], pcapMajor)
	binary.LittleEndian.PutUint16(h[6:], pcapMinor)
	binary.LittleEndian.PutUint32(h[16:], maxFrame) // octets kept of each frame: all
	binary.LittleEndian.PutUint32(h[20:], pcapEthernet)
	t.write(h[:])
	return t, nil
}

// write is called with mu held, or before anybody else knows of the tap.
func (t *tap) write(b []byte) {
	if t.err == nil {
		_, t.err = t.w.Write(b)
	}
}

// record adds a frame.
func (t *tap) record(frame []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file == nil {
		return
	}
	var h [pcapFrameSize]byte
	now := time.Now()
	binary.LittleEndian.PutUint32(h[0:], uint32(now.Unix()))
	binary.LittleEndian.PutUint32(h[4:], uint32(now.Nanosecond()))
	binary.LittleEndian.PutUint32(h[8:], uint32(len(frame)))
	binary.LittleEndian.PutUint32(h[12:], uint32(len(frame)))
	t.write(h[:])
	t.write(frame)
}

// close writes what is left.
func (t *tap) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = t.w.Flush()
	}
	if err := t.file.Close(); t.err == nil {
		t.err = err
	}
	t.file = nil
	return t.err
}

// Capture records all that passes the link, whichever guests it is between, until Stop or the end
// of the test. Nothing gets lost. The file is in the test's artifact directory.
func (l *Link) Capture(t testing.TB, name string) *Capture { return l.capture(t, name, nil) }

// capture records what goes to a port or comes from it.
func (l *Link) capture(t testing.TB, name string, of *port) *Capture {
	t.Helper()
	c := &Capture{File: filepath.Join(t.ArtifactDir(), name+".pcap")}
	tap, err := newTap(c.File)
	if err != nil {
		t.Fatal(err)
	}
	c.stop = func() error {
		time.Sleep(captureSettle)
		l.mu.Lock()
		delete(l.taps, tap)
		l.mu.Unlock()
		return tap.close()
	}
	t.Cleanup(func() { c.Stop() })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.taps[tap] = of
	return c
}
