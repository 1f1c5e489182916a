package virtiofs

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/keep/slotfile"

	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// inode returns the number of an open file.
func inode(t *testing.T, fd int) uint64 {
	t.Helper()
	var st unix.Stat_t
	kit.Must(t, unix.Fstat(fd, &st))
	return st.Ino
}

// TestDescriptorsAreKept adds and drops descriptors, and opens the queue again in between, as the
// next process does. The queue must have all that are in use, and few others.
func TestDescriptorsAreKept(t *testing.T) {
	d, err := newDescriptors(0)
	kit.Must(t, err)
	rng := rand.New(rand.NewPCG(1, 1))
	want := make(map[uint64]uint64) // inodes by message
	var ids []uint64
	for i := range 600 {
		if len(ids) < 40 && rng.IntN(2) == 0 {
			fd, err := unix.MemfdCreate("kept", unix.MFD_CLOEXEC)
			kit.Must(t, err)
			id, err := d.add(fd)
			kit.Must(t, err)
			want[id] = inode(t, fd)
			ids = append(ids, id)
			unix.Close(fd)
		} else if len(ids) > 0 {
			at := rng.IntN(len(ids))
			d.drop(maxStale, ids[at])
			delete(want, ids[at])
			ids = append(ids[:at], ids[at+1:]...)
		}
		if len(d.queue) > len(want)+1+maxStale {
			t.Fatalf("queue of %d messages, %d in use", len(d.queue), len(want)+1)
		}
		if i%20 > 0 {
			continue
		}
		if i%40 == 0 && d.live[d.queue[0]] { // a process was killed before it received the head again
			id, fds, err := d.peek()
			kit.Must(t, err)
			kit.Must(t, d.put(id, fds))
			closeAll(fds)
		}
		recv, err := duplicate(d.recv)
		kit.Must(t, err)
		d.close()
		var files map[uint64][]int
		d, files, err = openDescriptors(recv)
		kit.Must(t, err)
		used := make(map[uint64]bool)
		for id, ino := range want {
			used[id] = true
			if len(files[id]) != 1 || inode(t, files[id][0]) != ino {
				t.Fatalf("message %d: got descriptors %v, want that of inode %d", id, files[id], ino)
			}
		}
		for _, fds := range files {
			closeAll(fds)
		}
		d.keepOnly(used)
		if len(d.queue) != len(want)+1 {
			t.Fatalf("queue of %d messages, want %d", len(d.queue), len(want)+1)
		}
	}
	d.close()
}

// TestStateOfAnotherVersionIsRefused changes the version of the records. The State stays as it is.
func TestStateOfAnotherVersionIsRefused(t *testing.T) {
	const atSchema = 12 // see package slotfile
	s, err := NewState()
	kit.Must(t, err)
	l, err := listen(filepath.Join(t.TempDir(), "s"))
	kit.Must(t, err)
	kit.Must(t, s.setListener(l))
	f, err := s.Descriptor()
	kit.Must(t, err)
	defer f.Close()
	records, err := s.file.Descriptor()
	kit.Must(t, err)
	defer records.Close()
	kit.Must(t, s.Close())
	set := func(version uint32) {
		_, err := records.WriteAt(binary.NativeEndian.AppendUint32(nil, version), atSchema)
		kit.Must(t, err)
	}
	set(stateSchema + 1)
	if s, err := OpenState(f); !errors.Is(err, slotfile.ErrVersion) && !errors.Is(err, slotfile.ErrCorrupt) {
		t.Errorf("got %v, %v, want an error", s, err)
	}
	if got := SocketOf(f); got != l.path {
		t.Errorf("socket: got %q, want %q", got, l.path)
	}
	set(stateSchema)
	s, err = OpenState(f)
	kit.Must(t, err)
	if !s.Listening() || s.Restarts() != 1 {
		t.Errorf("listening %v, restarts %d; want true, 1", s.Listening(), s.Restarts())
	}
	kit.Must(t, s.Discard(l.path))
	kit.Must(t, s.Close())
	if _, err := os.Lstat(l.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket after its end: %v", err)
	}
	kit.Must(t, l.Close())
}

// TestMessageInPieces sends a message with descriptors in pieces.
func TestMessageInPieces(t *testing.T) {
	d := newDevice(t)
	v := d.dial(t)
	v.message(msgSetFeatures, le64(features))
	v.message(msgSetProtocolFeatures, le64(protocolFeatures))
	payload := memTable(region{guestBase, memSize, userBase, 0})
	b := binary.LittleEndian.AppendUint32(nil, msgSetMemTable)
	b = binary.LittleEndian.AppendUint32(b, flagNeedReply|messageVersion)
	b = append(binary.LittleEndian.AppendUint32(b, uint32(len(payload))), payload...)
	for i, piece := range [][]byte{b[:5], b[5:14], b[14:]} {
		var oob []byte
		if i == 1 {
			oob = unix.UnixRights(v.memfd)
		}
		_, _, err := v.conn.WriteMsgUnix(piece, oob, nil)
		kit.Must(t, err)
		time.Sleep(5 * time.Millisecond) // the test also passes when the pieces come together
	}
	if reply, err := v.receive(); err != nil || binary.LittleEndian.Uint64(reply) != 0 {
		t.Fatalf("message in pieces: got % x, %v", reply, err)
	}
}
