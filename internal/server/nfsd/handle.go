package nfsd

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/nfsrdmad/nfsrdmad/pkg/nfs/nfs3"
)

// Layout of an NFSv3 file handle of this server:
//
//	format  1 byte
//	MAC     16 bytes: HMAC-SHA256 over the export's identity, the format and the body
//	body    formatKernel: type (4 bytes) and bytes of the kernel's handle
//	        formatInode:  inode number and creation time (20 bytes)
//
// The MAC makes handles that no client was given useless, so that a client cannot reach files
// outside the export by inventing their handles.
const (
	formatKernel   = 1
	formatInode    = 2
	macSize        = 16
	handleHeader   = 1 + macSize
	nfsHandleRoom  = nfs3.FHSize - handleHeader
	kernelTypeSize = 4
	inodeBodySize  = 8 + 8 + 4
)

// A signer makes and checks handles of one export.
type signer struct {
	export []byte // identity of the export: file system and root directory
	pool   sync.Pool
}

func newSigner(key, export []byte) *signer {
	s := &signer{export: export}
	s.pool.New = func() any { return hmac.New(sha256.New, key) }
	return s
}

// sign makes the handle with this body.
func (s *signer) sign(format byte, body []byte) (nfs3.FH, error) {
	var b [nfs3.FHSize]byte
	b[0] = format
	n := handleHeader + copy(b[handleHeader:], body)
	if n < handleHeader+len(body) {
		return nfs3.FH{}, unix.EOVERFLOW
	}
	s.mac(b[1:handleHeader], format, body)
	return nfs3.NewFH(b[:n])
}

// verify returns the format and the body of a handle that this server made.
func (s *signer) verify(fh *nfs3.FH) (format byte, body []byte, st nfs3.Status) {
	b := fh.Bytes()
	if len(b) <= handleHeader || b[0] != formatKernel && b[0] != formatInode {
		return 0, nil, nfs3.ErrBadHandle
	}
	var want [macSize]byte
	s.mac(want[:], b[0], b[handleHeader:])
	if !hmac.Equal(want[:], b[1:handleHeader]) {
		return 0, nil, nfs3.ErrStale // of another export, or made up
	}
	return b[0], b[handleHeader:], nfs3.OK
}

func (s *signer) mac(out []byte, format byte, body []byte) {
	h := s.pool.Get().(hash.Hash)
	defer s.pool.Put(h)
	h.Reset()
	var sum [sha256.Size]byte
	h.Write(s.export)
	h.Write([]byte{format})
	h.Write(body)
	copy(out, h.Sum(sum[:0]))
}

func appendKernelHandle(b []byte, h *kernelHandle) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(h.typ))
	return append(b, h.bytes[:h.size]...)
}

func parseKernelHandle(body []byte, h *kernelHandle) bool {
	if len(body) < kernelTypeSize || len(body)-kernelTypeSize > maxKernelHandle {
		return false
	}
	h.typ = int32(binary.BigEndian.Uint32(body))
	h.size = uint32(copy(h.bytes[:], body[kernelTypeSize:]))
	return true
}

const (
	keyFile = "handle.key"
	keySize = 32
)

// handleKey reads the key of this host's file handles from dir, and makes it when there is none, so
// that handles survive a restart of the server.
func handleKey(dir string) ([]byte, error) {
	if dir == "" {
		return nil, errors.New("no state directory")
	}
	name := filepath.Join(dir, keyFile)
	if key, err := readKey(name); !errors.Is(err, fs.ErrNotExist) {
		return key, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	key := newKey()
	f, err := os.CreateTemp(dir, keyFile+".*") // mode 0600
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(key)
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return nil, err
	}
	// Another server may make the key at the same time: the first one stays.
	if err := os.Link(f.Name(), name); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if d, err := os.Open(dir); err == nil {
		_ = d.Sync()
		d.Close()
	}
	return readKey(name)
}

func newKey() []byte {
	key := make([]byte, keySize)
	_, _ = rand.Read(key) // never fails
	return key
}

func readKey(name string) ([]byte, error) {
	key, err := os.ReadFile(name)
	if err == nil && len(key) != keySize {
		return nil, fmt.Errorf("read %s: got %d bytes, want %d; remove the file", name, len(key), keySize)
	}
	return key, err
}
